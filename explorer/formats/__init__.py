"""What a person hands in: our own YAML or JSON, a Hugging Face config.json, or a Cerebras Model Zoo YAML."""
