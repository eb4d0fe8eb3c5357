"""Load the tokenizer and the chat format of a config, and try them before data is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from mmjax.config import ChatFormat, Placeholder
from mmjax.data.sample import BadSample, Conversation, Medium, Message
from mmjax.data.text.chat import Chat
from mmjax.data.text.chat_template import (
    ASSISTANT,
    REASONING,
    Template,
    compile_any_of,
    load_template,
)
from mmjax.data.text.placeholders import folder_placeholders
from mmjax.data.text.tokenizer import Tokenizer, load_tokenizer
from mmjax.errors import UserError
from mmjax.hub import checkpoint_folder


def load_chat(form: ChatFormat) -> Chat:
    """Load the tokenizer and chat template of a folder and try them out on a conversation.

    Raises UserError as `load_prompt_chat`, and where the loss mask can't be determined.
    """
    chat = load_prompt_chat(form)
    return replace(chat, notes=_try_out(chat))


def load_prompt_chat(form: ChatFormat) -> Chat:
    """Load the tokenizer and chat template of a folder for prompts alone; it may be one that can't be trained with.

    Raises UserError where a file is missing or wrong, or a placeholder is no token.
    """
    folder = form.folder if Path(form.folder).is_dir() else str(checkpoint_folder(form.folder))
    tokenizer = load_tokenizer(folder)
    template = load_template(replace(form, folder=folder), tokenizer)
    folder_defaults = {
        kind: p
        for kind, p in folder_placeholders(folder, tokenizer.named).items()
        # checkpoints that were made without
        if kind != "video" or tokenizer.id(p.token or p.written) is not None
    }
    placeholders = {**folder_defaults, **form.placeholders}
    for kind in placeholders:
        if kind not in get_args(Medium):
            raise UserError(f"chat.placeholders.{kind}: a medium is image, audio or video")
    if len({p.written for p in placeholders.values()}) < len(placeholders):
        raise UserError(
            "chat.placeholders: images and clips are written alike; write them so that they can be told apart"
        )
    return Chat(
        form=form,
        tokenizer=tokenizer,
        template=template,
        placeholders=placeholders,
        token={kind: _token_of(tokenizer, kind, p) for kind, p in placeholders.items()},
        written=compile_any_of(p.written for p in placeholders.values()),
        control=compile_any_of(_control_tokens(tokenizer, template, placeholders)),
        processor=bool(folder_defaults),
    )


def _token_of(tokenizer: Tokenizer, kind: str, place: Placeholder) -> int:
    token = place.token or place.written
    token_id = tokenizer.id(token)
    try:
        is_one_token = token_id is not None and tokenizer.encode(token).ids.tolist() == [token_id]
    except BadSample:
        is_one_token = False
    if token_id is None or not is_one_token:
        raise UserError(
            f"{Path(tokenizer.folder) / 'tokenizer.json'} has no special token {token!r}, which is to stand for media "
            f"of the kind {kind}; add it with transformers, or name another one as chat.placeholders.{kind}.token"
        )
    return token_id


def _control_tokens(
    tokenizer: Tokenizer, template: Template, placeholders: dict[str, Placeholder]
) -> set[str]:
    """List the tokens that delimit turns and texts or stand for media; others, such as boxes, may occur in a text."""
    # Templates may compose tokens from parts, such as "<|" + role + "|>", which only their output
    # shows.
    example = "".join(
        _example(template, roles) for roles in (("system", "user", ASSISTANT), ("user", ASSISTANT))
    )
    named = {tokenizer.named.get(f"{name}_token", "") for name in ("bos", "eos", "pad")}
    written = {t for t in tokenizer.special if t.strip() and (t in template.source or t in example)}
    media = {
        text for p in placeholders.values() for text in (p.written, p.token, p.before, p.after)
    }
    return named | written | media


def _example(template: Template, roles: Sequence[str]) -> str:
    """Render a dummy conversation and its prompt; empty where the template refuses it."""
    try:
        messages = template.messages(
            Conversation(tuple(Message(role, ("a",)) for role in roles)), {}
        )
        return template.render(messages, False)[0] + template.render(messages[:-1], True)[0]
    except BadSample:
        return ""


def _try_out(chat: Chat) -> tuple[str, ...]:
    """Try the template on one question and answer. Raises UserError where their loss mask cannot be determined."""
    where = chat.template.where
    answers = [Message(ASSISTANT, ("This.",))]
    # whose prompts may begin what is thought, so that no answer is without
    if REASONING in chat.template.source:
        answers.append(replace(answers[0], fields=((REASONING, "Because."),)))
    for answer in answers:
        try:
            line = chat._line(Conversation((Message("user", ("What?",)), answer)))
            chat._tokens(line, chat.tokenizer.encode(line.text))
            break
        except BadSample as bad:
            if answer is answers[-1]:
                raise UserError(
                    f"the chat template {where} can't be trained with, not even on a question and its answer: {bad}; "
                    "change a copy of it, and give that as chat.template"
                ) from None
    if line.text[slice(*line.answers[-1])].rstrip().endswith(chat.template.special):
        return ()
    return (
        f"the chat template {where} ends no answer with a token of its own, so nothing teaches the model "
        "to stop; write {{ eos_token }} behind the answer in a copy of it, and give the copy as chat.template",
    )
