"""The interface by which a loss of several answers makes branches of a sample of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mmjax.config import LossConfig
from mmjax.data.sample import Conversation, Text


class Records(Protocol):
    """Conversations of a data set by their numbers."""

    def __len__(self) -> int: ...

    def conversation(self, index: int) -> Conversation:
        """Read a record. Raises BadSample."""


Weighted = tuple[np.ndarray, np.ndarray]  # tokens of an answer, int32 [n], and their weights


@dataclass(frozen=True)
class Branching(ABC):
    """Turn a record's answers into branches of its sample, for the loss of such answers."""

    loss: LossConfig

    def read(self, records: Records, index: int) -> Conversation:
        """Read a conversation, with what its sample needs of other records. Raises BadSample."""
        return records.conversation(index)

    @abstractmethod
    def answered(self, conversation: Conversation) -> Sequence[Conversation]:
        """Return the conversation once with each answer at its end; nothing where answers are tokens already.

        Raises BadSample where it has no such answers.
        """

    @abstractmethod
    def texts(
        self,
        conversation: Conversation,
        answers: Sequence[Weighted],
        vocab: int,
    ) -> Sequence[Text]:
        """Build the text of each branch, which begins with the prompt's last token, as it predicts the first of each.

        answers: tokens and weights of each of those `answered`, from the prompt's last token on; of
        the prompt alone where these are none. vocab: tokens of the tokenizer. Raises BadSample
        where what the loss reads is missing.
        """
