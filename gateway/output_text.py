"""One output as the client sees it: its tokens become text, and the text ends where it must."""

from collections.abc import Iterable

from prefixgate.gateway.detokenizer import Detokenizer, TokenPieces
from prefixgate.gateway.stop import StopScanner, StopStrings
from prefixgate.proto import gateway_pb2, generation_pb2, worker_pb2

_STOP = generation_pb2.FINISH_REASON_STOP


class OutputText:
    """An output's text so far. Streamed pieces and the end take one path, so that their sum is the whole."""

    def __init__(self, index: int, pieces: TokenPieces, stops: StopStrings) -> None:
        self.index = index
        self.finish_reason: generation_pb2.FinishReason = generation_pb2.FINISH_REASON_UNSPECIFIED
        self._detokenizer = Detokenizer(pieces)
        self._scanner = StopScanner(stops)

    @property
    def is_finished(self) -> bool:
        return bool(self.finish_reason)

    def push(self, news: worker_pb2.OutputTokens) -> gateway_pb2.OutputDelta | None:
        """Take what the worker says of this output, and return what the client gets; None for nothing.

        After a stop string was found the worker may still send tokens that were on their way; they are no part of the
        output.
        """
        if self.is_finished:
            return None
        delta = gateway_pb2.OutputDelta(index=self.index)
        self._take_tokens(delta, news)
        if not self.is_finished and news.finish_reason:
            self._finish(delta, news.finish_reason)
        return delta if delta.token_ids or delta.finish_reason else None

    def _take_tokens(self, delta: gateway_pb2.OutputDelta, news: worker_pb2.OutputTokens) -> None:
        # The id that made the worker stop is an end mark: a client gets it as an id and not as text.
        silent = len(news.token_ids) - 1 if news.finish_reason == _STOP else len(news.token_ids)
        texts = []
        for position, token_id in enumerate(news.token_ids):
            delta.token_ids.append(token_id)
            delta.logprobs.extend(news.logprobs[position : position + 1])
            if position == silent:
                break
            if text := self._scan(delta, self._detokenizer.push(token_id)):
                texts.append(text)
            if self.is_finished:
                break
        delta.text = "".join(texts)

    def _finish(self, delta: gateway_pb2.OutputDelta, reason: generation_pb2.FinishReason) -> None:
        delta.text += self._scan(delta, self._detokenizer.flush())
        if not self.is_finished:
            delta.text += self._scanner.flush()
            self.finish_reason = delta.finish_reason = reason

    def _scan(self, delta: gateway_pb2.OutputDelta, text: str) -> str:
        """Let text pass up to a stop string; where one is found the output is finished."""
        scanned = self._scanner.push(text)
        if scanned.matched_stop:
            self.finish_reason = delta.finish_reason = _STOP
            delta.matched_stop = scanned.matched_stop
        return scanned.text


def whole(outputs: int, deltas: Iterable[gateway_pb2.OutputDelta]) -> list[gateway_pb2.Output]:
    """Put the deltas of a call together to its outputs, in order of index."""
    answer = [gateway_pb2.Output(index=index) for index in range(outputs)]
    texts: list[list[str]] = [[] for _ in range(outputs)]
    for delta in deltas:
        output = answer[delta.index]
        texts[delta.index].append(delta.text)
        output.token_ids.extend(delta.token_ids)
        output.logprobs.extend(delta.logprobs)
        if delta.finish_reason:
            output.finish_reason, output.matched_stop = delta.finish_reason, delta.matched_stop
    for output, parts in zip(answer, texts, strict=True):
        output.text = "".join(parts)
    return answer
