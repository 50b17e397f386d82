"""A conversation: what is noted of it, how it is written without a template, and where an answer ends."""

from collections.abc import Sequence

import pytest

from moetool.errors import InvalidInputError
from moetool.talk.conversation import STOP, Conversation, Turn, Until, Write, plain_prompt


class Echo:
    """Says how many messages there are."""

    has_template = True

    def answer(self, messages: Sequence[Turn], write: Write) -> tuple[str, int]:
        if messages[-1]["content"] == "fail":
            raise InvalidInputError("no")
        write(f" {len(messages)} ")
        return f" {len(messages)} ", 1


def test_a_conversation_keeps_all_that_was_said() -> None:
    talk, written = Conversation(Echo(), "Be brief."), []
    assert [talk.say(text, written.append).text for text in ("a", "b")] == ["2", "4"]
    assert [own["role"] for own in talk.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [own["content"] for own in talk.messages] == ["Be brief.", "a", "2", "b", "4"]
    assert written == [" 2 ", " 4 "]


def test_a_question_that_fails_is_forgotten_and_a_reset_leaves_the_system_message() -> None:
    talk = Conversation(Echo(), "Be brief.")
    talk.say("a", print)
    before = list(talk.messages)
    with pytest.raises(InvalidInputError):
        talk.say("fail", print)
    assert talk.messages == before
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "Be brief."}]


def test_messages_without_a_template() -> None:
    said = [("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi."), ("user", "Bye")]
    prompt = plain_prompt([{"role": role, "content": text} for role, text in said])
    assert prompt == "Be brief.\nUser: Hello\nAssistant: Hi.\nUser: Bye\nAssistant:"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_an_answer_ends_where_the_model_speaks_for_the_user(size: int) -> None:
    said, written = f" \n\nOne.\nUse two:\nUs{STOP} Three?", []
    until = Until(written.append, [STOP])
    for start in range(0, len(said), size):
        until(said[start : start + size])
    until.finish()
    assert until.text == "".join(written) == "One.\nUse two:\nUs"


def test_what_only_began_as_a_sign_is_passed_on_at_the_end() -> None:
    written: list[str] = []
    until = Until(written.append, [STOP])
    until("One\nUs")
    assert written == ["One"]
    until.finish()
    assert until.text == "".join(written) == "One\nUs"
