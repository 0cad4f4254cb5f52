"""What a harness, or a program in its box, may send: a clear refusal, never an error of our own."""

import pytest

from lego.chat.messages import BadMessage, read_messages


@pytest.mark.parametrize("raw", [{"role": []}, {"role": "user", "content": [{"type": []}]}, {"role": {}}, {}])
def test_a_field_of_the_wrong_kind_is_a_bad_message(raw: dict):
    with pytest.raises(BadMessage):
        read_messages([raw])
