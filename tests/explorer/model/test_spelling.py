"""What others have written, in a message: whole words of it."""

from __future__ import annotations

import pytest

from bexp.explorer.formats.document import FormatError
from bexp.explorer.formats.request import parse_request
from bexp.explorer.model.spelling import LONGEST_WORD, shortened

LONG = "a_name_that_is_longer_than_most_and_means_nothing_unless_it_is_whole"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("short", "short"),
        (LONG, LONG),
        (f"text_config.{LONG}", f"text_config.{LONG}"),
        (f"text_config.{LONG}.{LONG}", f"text_config.{LONG}..."),
        (f"NVIDIA GH200 144G HBM3e beside a Grace CPU, {LONG}", "NVIDIA GH200 144G HBM3e beside a Grace CPU..."),
        (f"{LONG} and more of it", f"{LONG}..."),
        (f"/data/{'team/' * 30}Llama", f"/data/{'team/' * 23}team..."),
        ("x" * LONGEST_WORD, "x" * LONGEST_WORD),
        ("x" * 5000, "(5,000 characters)"),
        ("x" * 5000 + " y", "(5,002 characters)"),
        ([1, 2], "[1, 2]"),
    ],
)
def test_a_text_is_cut_between_words(text: object, shown: str) -> None:
    assert shortened(text) == shown
    assert shortened("one two three", 9) == "one two..."
    assert (
        shortened("model.safetensors: " + "no more space " * 30, 300)
        == "model.safetensors: " + ("no more space " * 20)[:-1] + "..."
    )


def test_a_notice_and_a_refusal_name_whole_keys() -> None:
    model = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    document = {**model, "vocab_size": 128, "intermediate_size": 128, "hidden_act": "silu", "target": "bexp"}
    (notice,) = parse_request({**document, LONG: None}).notices
    assert notice.endswith(f": {LONG}")
    with pytest.raises(FormatError, match=f"'{LONG}' is not supported"):
        parse_request({**document, "torch_dtype": LONG})
