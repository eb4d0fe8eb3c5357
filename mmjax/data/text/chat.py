"""Convert conversations to token sequences with a checkpoint's own tokenizer and chat template.

A conversation's text is tokenized as a whole, so that ids are those that the checkpoint was trained
with; the answers' tokens are then found by their characters. A medium is one token of the text, in
whose place its items go: they take as many positions as their encoder makes tokens of them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from mmjax.config import ChatFormat, Placeholder
from mmjax.data.sample import (
    JSON_FIELDS,
    TOOL_CALLS,
    BadSample,
    Conversation,
    Message,
    Sample,
    Text,
)
from mmjax.data.text.branching import Branching, Records
from mmjax.data.text.chat_template import (
    ASSISTANT,
    BEGIN_OF_THINKING,
    END_OF_THINKING,
    REASONING,
    RenderedChat,
    Template,
    TokenizerInput,
    check_places,
    field_values,
    write_media,
)
from mmjax.data.text.conversation_tokens import (
    BRANCH,
    OfMedia,
    Tokens,
    number_items,
    outline_tokens,
)
from mmjax.data.text.template_sandbox import BEGIN, END
from mmjax.data.text.tokenizer import Encoded, Tokenizer
from mmjax.errors import UserError

BATCH = 1024  # conversations that are tokenized at once
# of their texts, unless one alone is longer; each takes up to 1.5 KB meanwhile
BATCH_CHARACTERS = 1 << 18
PROMPT_END = 32  # tokens at the end of a prompt that are compared first
PROMPT_ENDS = 1024  # cached tokenizations of such ends
# Not allowed in a text: halves of UTF-16 surrogate pairs, and the marks around generated text.
_NO_TEXT = re.compile(f"[\ud800-\udfff{BEGIN}{END}]")


@dataclass(frozen=True)
class Chat:
    """A checkpoint's tokenizer and chat template, with the text that stands for media."""

    form: ChatFormat
    tokenizer: Tokenizer
    template: Template
    placeholders: dict[str, Placeholder]  # by medium
    token: dict[str, int]  # token that stands for a medium, by medium
    written: re.Pattern[str]  # finds what the template writes for any medium
    control: re.Pattern[str]  # finds tokens that only the template may write
    # whether the folder has a media processor, which keeps the tokens that the tokenizer adds
    processor: bool
    notes: tuple[str, ...] = ()  # for the user
    # of several answers to one prompt; None: a conversation's own are trained on
    branching: Branching | None = None
    # text -> ids
    _prompt_ends: dict[str, list[int]] = field(default_factory=dict, repr=False, compare=False)

    def sample(
        self,
        conversation: Conversation,
        encoders: OfMedia = (),
        texts: OfMedia = (),
    ) -> Sample:
        """Tokenize a conversation for training: loss on assistant text and the end-of-turn token only.

        Of several answers to one prompt each is a branch that begins with the prompt's last token.

        `encoders` names, for each medium in order, the encoder of each of its parts; `texts` has
        what is written before each part and behind the last, where its medium has such text (the
        times of a video's frames). Raises BadSample where the conversation can't be trained on.
        """
        lines = self._lines(conversation, texts, encoders)
        tokens, answers = self._branches(
            conversation, lines, [self.tokenizer.encode(line.text) for line in lines]
        )
        items = number_items(_kinds(conversation), encoders, texts)
        if answers:
            return Sample((*tokens.sample(tokens.weights, items).segments, *answers))
        count = np.count_nonzero(tokens.weights)
        # With "sample" every sample counts alike, whatever its length; "square" lies between, as in
        # InternVL.
        share = {"token": 1.0, "sample": 1 / count, "square": count**-0.5}[self.form.loss_reduction]
        return tokens.sample(tokens.weights * np.float32(share), items)

    def prompt(
        self,
        conversation: Conversation,
        encoders: OfMedia = (),
        texts: OfMedia = (),
    ) -> Sample:
        """Tokenize a conversation that ends with a question, up to where the answer begins. All weights are 0.

        Raises BadSample where it ends with an answer, or can't be used.
        """
        line = self._prompt_line(conversation, texts, encoders)
        tokens = self._tokens(line, self.tokenizer.encode(line.text))
        items = number_items(_kinds(conversation), encoders, texts)
        return tokens.sample(np.zeros(len(tokens.ids), np.float32), items)

    def read(self, records: Records, index: int) -> Conversation:
        """Read a conversation, with what its sample needs of other records. Raises BadSample."""
        if self.branching is None:
            return records.conversation(index)
        return self.branching.read(records, index)

    @property
    def ends(self) -> tuple[int, ...]:
        return self.tokenizer.ends

    def decode_answer(self, tokens: Sequence[int]) -> str:
        """Decode generated tokens up to the end of the answer."""
        stop = next(
            (k for k, token in enumerate(tokens) if token in self.tokenizer.ends), len(tokens)
        )
        return self.tokenizer.decode(tokens[:stop], skip_special=True).strip()

    def answer_message(self, answer: str) -> Message:
        """Make the message of a generated answer for the next prompt; its thought stands apart, as in records."""
        reasoning, end, answer_text = answer.rpartition(END_OF_THINKING)
        if not end or REASONING not in self.template.source:
            return Message(ASSISTANT, (answer,))
        reasoning = reasoning.strip().removeprefix(BEGIN_OF_THINKING).strip()
        return Message(ASSISTANT, (answer_text.strip(),), fields=((REASONING, reasoning),))

    def text_tokens(self, conversations: Iterable[Conversation]) -> list[int | BadSample]:
        """Count the text tokens of each conversation without its media, or return why `sample` refuses it."""
        outlines = self.outlines(conversations)
        return [one if isinstance(one, BadSample) else outline_tokens(one) for one in outlines]

    def outlines(self, conversations: Iterable[Conversation]) -> list[list[int] | BadSample]:
        """List the text tokens between the media of each conversation, or return why `sample` refuses it.

        Between these numbers stand codes: 5, TRAINED, 2, BRANCH, 7. No more conversations are held
        than are tokenized at once.
        """
        counts: list[list[int] | BadSample] = []
        batch: list[tuple[Conversation, list[TokenizerInput] | BadSample]] = []
        characters = 0
        for conversation in conversations:
            lines = _or_bad(self._lines, conversation)
            batch.append((conversation, lines))
            if not isinstance(lines, BadSample):
                characters += sum(len(line.text) for line in lines)
            if len(batch) >= BATCH or characters >= BATCH_CHARACTERS:
                counts += self._counts(batch)
                batch, characters = [], 0
        return counts + self._counts(batch)

    def _counts(
        self, batch: Sequence[tuple[Conversation, list[TokenizerInput] | BadSample]]
    ) -> list[list[int] | BadSample]:
        texts = [
            line.text for _, lines in batch if not isinstance(lines, BadSample) for line in lines
        ]
        encoded = iter(self.tokenizer.encode_all(texts))
        return [
            lines
            if isinstance(lines, BadSample)
            else _or_bad(self._count, conversation, lines, [next(encoded) for _ in lines])
            for conversation, lines in batch
        ]

    def _count(
        self,
        conversation: Conversation,
        lines: Sequence[TokenizerInput],
        encoded: Sequence[Encoded | BadSample],
    ) -> list[int]:
        for text in encoded:
            if isinstance(text, BadSample):
                raise text
        tokens, answers = self._branches(conversation, lines, encoded)
        return tokens.outline() + [
            code for answer in answers for code in (BRANCH, len(answer.tokens))
        ]

    def fingerprint(self) -> str:
        """Hash everything that a conversation's tokens and weights depend on."""
        media = {kind: asdict(p) for kind, p in self.placeholders.items()}
        parts = [self.tokenizer.fingerprint(), self.template.source, repr(self.form), repr(media)]
        if self.form.line_breaks == "text":
            parts.append("line breaks are text")
        if self.branching is not None:
            loss = self.branching.loss
            parts.append(repr((loss.kind, getattr(loss, "loss_type", ""), loss.inputs)))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    # ----------------------------------------------------------------------------------------------
    # text

    def _lines(
        self,
        conversation: Conversation,
        texts: OfMedia = (),
        encoders: OfMedia = (),
    ) -> list[TokenizerInput]:
        """Render the texts to tokenize: the conversation, or the prompt with each answer, or alone."""
        if self.branching is not None:
            answered = self.branching.answered(conversation)
            lines = [self._line(one, texts, encoders, last_only=True) for one in answered]
            return lines or [self._prompt_line(conversation, texts, encoders)]
        if kind := conversation.loss_of_answers:
            raise BadSample(
                f"has several answers to one prompt, which loss=cross_entropy does not take: set loss={kind}"
            )
        return [self._line(conversation, texts, encoders, self.form.train_on == "last_assistant")]

    def _prompt_line(
        self,
        conversation: Conversation,
        texts: OfMedia,
        encoders: OfMedia,
    ) -> TokenizerInput:
        """Render a conversation that ends with a question, up to where the answer begins."""
        if not conversation.messages or conversation.messages[-1].role == ASSISTANT:
            raise BadSample("it does not end with a question, so there is nothing to answer")
        text, _ = self.template.render(self._messages(conversation), True)
        return self._with_media(RenderedChat(text, ()), conversation, texts, encoders)

    def _line(
        self,
        conversation: Conversation,
        texts: OfMedia = (),
        encoders: OfMedia = (),
        last_only: bool = False,
    ) -> TokenizerInput:
        """Render the text to tokenize, with the characters of the answers that are trained on."""
        answer_weights = [
            message.weight for message in conversation.messages if message.role == ASSISTANT
        ]
        if not answer_weights:
            raise BadSample("the assistant says nothing in it")
        weights = [message.weight for message in conversation.messages]
        if not any(answer_weights[-1:] if last_only else answer_weights):
            raise BadSample(
                f"its {'last ' if last_only else ''}answer has weight=0: there is nothing to learn"
            )
        rendered = self.template.rendered(self._messages(conversation), last_only, weights)
        if not rendered.answers:
            raise BadSample("the chat template writes nothing that the assistant says")
        return self._with_media(rendered, conversation, texts, encoders)

    def _messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        """Convert to the template's messages. Raises BadSample where their text would be taken for control tokens."""
        for k, message in enumerate(conversation.messages):
            text = "".join(part for part in message.parts if isinstance(part, str))
            media = any(not isinstance(part, str) for part in message.parts)
            fields = field_values(message)
            if not (text.strip() or media or message.role == "system" or TOOL_CALLS in fields):
                raise BadSample(f"message {k} ({message.role}) is empty")
            for key in (REASONING, *JSON_FIELDS):
                if key not in fields or key in self.template.source:
                    continue
                raise BadSample(
                    f"message {k} ({message.role}) has {key}, which the chat template {self.template.where} does "
                    "not write; write it into the content as the model has it, or leave the key out"
                )
            written = (
                x if isinstance(x, str) else json.dumps(x, ensure_ascii=False)
                for x in fields.values()
            )
            text = "\n".join((text, *written))
            # A user's "<|im_end|>" would end the turn, and its "<image>" would stand for a medium.
            if match := self.control.search(text):
                raise BadSample(
                    f"message {k} ({message.role}) says {match[0]!r}, which only the chat template may write"
                )
            if _NO_TEXT.search(text):
                raise BadSample(f"message {k} ({message.role}) is not Unicode text")
        for medium in conversation.media():
            if medium.kind not in self.placeholders:
                raise UserError(
                    f"the data has media of the kind {medium.kind}, but it is not known how {self.form.folder} writes "
                    f"them (known: {', '.join(self.placeholders) or 'none'}); if its template does, say it: "
                    f"data.chat.placeholders.{medium.kind}.written"
                )
        return self.template.messages(
            conversation, {kind: p.written for kind, p in self.placeholders.items()}
        )

    def _with_media(
        self,
        rendered: RenderedChat,
        conversation: Conversation,
        texts: OfMedia,
        encoders: OfMedia,
    ) -> TokenizerInput:
        # The template's placeholders become tokens, and must be as many as the conversation's
        # media.
        kinds = _kinds(conversation)
        kind_of = {p.written: kind for kind, p in self.placeholders.items()}
        check_places([kind_of[match[0]] for match in self.written.finditer(rendered.text)], kinds)
        by_kind = {
            kind: [t for k, t in zip(kinds, texts, strict=True) if k == kind]
            for kind in kinds
            if texts
        }
        # A video with items of two encoders has its sound among them.
        videos = [
            len(set(names)) > 1
            for kind, names in zip(kinds, encoders, strict=False)
            if kind == "video"
        ]
        if any(videos) and not self.placeholders["video"].sound_before:
            raise UserError(
                f"it is not known how {self.form.folder} marks videos with their sound; say it: data.chat.placeholders."
                "video.sound_before and sound_after, or leave model.encoders.NAME.videos.sound out"
            )
        return write_media(rendered, self.placeholders, self.written, by_kind, videos)

    # ----------------------------------------------------------------------------------------------
    # tokens

    def _branches(
        self,
        conversation: Conversation,
        lines: Sequence[TokenizerInput],
        encoded: Sequence[Encoded],
    ) -> tuple[Tokens, tuple[Text, ...]]:
        """Tokenize what `_lines` rendered; where a loss compares answers, their shared prompt and each as a branch.

        The prompt's last token begins every branch, as it predicts the first token of each.
        """
        lines_tokens = [self._tokens(line, one) for line, one in zip(lines, encoded, strict=True)]
        tokens = lines_tokens[0]
        if self.branching is None:
            return tokens, ()
        begins = [
            next(iter(np.flatnonzero(one.weights).tolist()), len(one.ids)) for one in lines_tokens
        ]
        begin = begins[0]
        prompts = [one.ids[:begin] for one in lines_tokens]
        if {*begins} != {begin} or any(
            not np.array_equal(prompt, prompts[0]) for prompt in prompts
        ):
            raise BadSample(
                "its prompt has other tokens before one of its answers than before the other"
            )
        starts = [(one.ids[begin - 1 :], one.weights[begin - 1 :]) for one in lines_tokens]
        answers = self.branching.texts(conversation, starts, len(self.tokenizer))
        if any((one.media >= begin - 1).any() for one in lines_tokens):
            kind = self.branching.loss.kind
            raise BadSample(
                f"has a medium right before its answers; loss={kind} needs text between them"
            )
        prompt = replace(
            tokens,
            ids=tokens.ids[: begin - 1],
            weights=np.zeros(begin - 1, np.float32),
            around=(tokens.around[0], ()),
        )
        return prompt, tuple(
            replace(answer, branch=number) for number, answer in enumerate(answers, start=1)
        )

    def _tokens(self, line: TokenizerInput, encoded: Encoded) -> Tokens:
        """Set loss weights on the tokens of answers, except media and the text around them.

        A token that straddles the boundary of an answer is trained on if any of its characters
        inside the answer is not white space.
        """
        media = np.flatnonzero(np.isin(encoded.ids, list(self.token.values())))
        if len(media) != len(line.media):
            raise BadSample(f"its tokens have {len(media)} places for {len(line.media)} media")
        # Multimodal processors tokenize with special tokens, except where the template has written
        # <s> already; what users say has none.
        has_bos = (self.tokenizer.named.get("bos_token") or "\0") in line.text
        around = self.tokenizer.around if self.processor and not has_bos else ((), ())
        for prompt_end in line.prompts:
            self._check_prompt(line.text, encoded, prompt_end)
        weights = np.zeros(len(encoded.ids), np.float32)
        for (begin, end), weight in zip(line.answers, line.weights, strict=True):
            tokens = encoded.touching(begin, end)
            weights[tokens] = weight
            # Only the first and the last token can straddle: " cat" where the answer is "cat", or
            # "cat\n".
            for edge in (tokens.start, tokens.stop - 1) if tokens.start < tokens.stop else ():
                token_begin = int(encoded.begin[edge])
                token_end = int(encoded.end[edge])
                if token_begin < begin or token_end > end:
                    inside = line.text[max(token_begin, begin) : min(token_end, end)]
                    weights[edge] = weight if inside.strip() else 0
        for span in line.media:
            weights[encoded.touching(*span)] = 0
        if not around[0]:
            weights[:1] = 0  # no token before it predicts it
        if line.answers and not weights.any():
            raise BadSample(
                "no token of what the assistant says can be predicted from one before it"
            )
        return Tokens(encoded.ids, weights, media, line.kinds, around)

    def _check_prompt(self, text: str, encoded: Encoded, end: int) -> None:
        """Raise BadSample where a prompt, `text[:end]`, has other tokens than at inference, without the answer."""
        count = int(np.searchsorted(encoded.end, end, side="right"))
        if count < len(encoded.ids) and encoded.begin[count] < end:
            raise BadSample(
                f"an answer's first characters and its prompt's last are one token; {_remedy(text, end)}"
            )
        # Tokenizing all of every prompt would double the work. No tokenizer looks far ahead, and
        # none beyond a special token, so tokenize the prompt's end and compare its second half,
        # which no longer depends on where it was cut.
        tail = encoded.ids[max(0, count - PROMPT_END) : count]
        special = np.flatnonzero(np.isin(tail, self._special))
        tail = tail[special[-1] + 1 :] if len(special) else tail
        if not len(tail):
            return
        tail_text = text[int(encoded.begin[count - len(tail)]) : end]
        tail_alone = self._prompt_ends.get(tail_text)
        if tail_alone is None:
            tail_alone = self.tokenizer.encode(tail_text).ids.tolist()
            # Behind a special token prompts mostly end alike.
            if len(special) and len(self._prompt_ends) < PROMPT_ENDS:
                self._prompt_ends[tail_text] = tail_alone
        compared = max(1, len(tail) // 2)
        if tail_alone[-compared:] != tail[-compared:].tolist():
            prompt_alone = self.tokenizer.encode(text[:end]).ids
            if not np.array_equal(prompt_alone, encoded.ids[:count]):
                raise BadSample(
                    f"its prompt has other tokens with the answer behind it; {_remedy(text, end)}"
                )

    @cached_property
    def _special(self) -> np.ndarray:
        return np.array([self.tokenizer.id(token) for token in self.tokenizer.special], np.int32)


def _remedy(text: str, end: int) -> str:
    """Return advice for a prompt that ends there and has other tokens when its answer follows."""
    if text[end:].lstrip().startswith(END_OF_THINKING):
        return (
            f"its prompt begins a thought, and the answer has none: give it {REASONING}, or say by the template's "
            "variables that there is none (data.chat.variables.enable_thinking=false)"
        )
    if text[end : end + 1].isspace():
        return "strip the answer"
    if text[end - 1 : end].isspace():
        return "drop the white space at the end of the template's generation prompt"
    return "end the template's generation prompt where a token ends"


def _or_bad(function: Any, *arguments: Any) -> Any:
    """Call the function and return its result, or the BadSample that it raises."""
    try:
        return function(*arguments)
    except BadSample as bad:
        return bad


def _kinds(conversation: Conversation) -> list[str]:
    return [medium.kind for medium in conversation.media()]
