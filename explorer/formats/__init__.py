"""The accepted configuration formats: native YAML or JSON, Hugging Face config.json, Cerebras Model Zoo YAML."""
