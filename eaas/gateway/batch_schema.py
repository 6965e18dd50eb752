"""Body of POST /v1/chat/completions/batch, which is vLLM's, and the chats that it comes down to. Pure."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eaas.gateway.errors import from_validation
from eaas.gateway.schema import MAX_PROMPTS, ChatRequest

# What is told of one conversation, or as one goes on.
_ALONE = ("echo", "prompt_logprobs", "stream", "tools")


class BatchChatRequest(BaseModel):
    """Several conversations; the other fields are those of a chat, and each conversation's."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    messages: Annotated[list[list[Any]], Field(min_length=1, max_length=MAX_PROMPTS)]

    @model_validator(mode="after")
    def _has_one_answer_each(self) -> BatchChatRequest:
        asked = self.model_extra or {}
        for name in _ALONE:
            value = asked.get(name)
            if value is not None and value is not False and value != []:
                raise ValueError(f"'{name}' is not supported with several conversations; leave it out")
        if asked.get("n") not in (None, 1):
            raise ValueError("'n' other than 1 is not supported with several conversations; leave it out")
        return self

    def chats(self) -> list[ChatRequest]:
        """One request for each conversation.

        Raises:
            ApiError: a value that no chat may have.
        """
        shared, (first, *others) = self.model_extra or {}, self.messages
        try:
            chat = ChatRequest.model_validate({**shared, "messages": first})
            # What all share is judged once: it may be large, and nothing else is done meanwhile.
            alone = [ChatRequest.model_validate({"messages": messages}) for messages in others]
            return [chat, *(chat.model_copy(update={"messages": other.messages}) for other in alone)]
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False, include_input=False)
            raise from_validation(problems) from None
