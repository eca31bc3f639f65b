from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixgate.gateway.client.answer import PartialAnswer, answer_of
from prefixgate.gateway.client.errors import BrokenStreamError
from prefixgate.gateway.client.parts import PartialWarm
from prefixgate.proto import gateway_pb2, generation_pb2

REASONS = [generation_pb2.FINISH_REASON_STOP, generation_pb2.FINISH_REASON_LENGTH]
COMPLETION = gateway_pb2.Completion(
    usage=generation_pb2.Usage(prompt_tokens=3, completion_tokens=5), request_id="r", model="m", incarnation="i"
)


@st.composite
def whole_answers(draw: st.DrawFn) -> gateway_pb2.CompleteResponse:
    """Draw an answer of one to three outputs."""
    outputs = [
        gateway_pb2.Output(
            index=index,
            text=draw(st.text(max_size=8)),
            token_ids=draw(st.lists(st.integers(0, 9), max_size=6)),
            finish_reason=draw(st.sampled_from(REASONS)),
            matched_stop=draw(st.sampled_from(["", "END"])),
        )
        for index in range(draw(st.integers(1, 3)))
    ]
    for output in outputs:
        output.logprobs.extend(generation_pb2.TokenLogprob(token_id=token, rank=1) for token in output.token_ids)
    return gateway_pb2.CompleteResponse(outputs=outputs, completion=COMPLETION)


def deltas_of(
    output: gateway_pb2.Output, text_cuts: Sequence[int], id_cuts: Sequence[int]
) -> list[gateway_pb2.OutputDelta]:
    """Cut an output into deltas: its text and its ids at places of their own, as text lags behind."""
    texts, ids = [0, *sorted(text_cuts), len(output.text)], [0, *sorted(id_cuts), len(output.token_ids)]
    deltas = [
        gateway_pb2.OutputDelta(
            index=output.index,
            text=output.text[texts[i] : texts[i + 1]],
            token_ids=output.token_ids[ids[i] : ids[i + 1]],
            logprobs=output.logprobs[ids[i] : ids[i + 1]],
        )
        for i in range(len(texts) - 1)
    ]
    deltas[-1].finish_reason, deltas[-1].matched_stop = output.finish_reason, output.matched_stop
    return deltas


@given(whole_answers(), st.data())
def test_however_an_answer_is_cut_it_adds_up(response: gateway_pb2.CompleteResponse, data: st.DataObject) -> None:
    queues = []
    for output in response.outputs:
        cuts = [
            data.draw(st.lists(st.integers(0, size), min_size=3, max_size=3))
            for size in (len(output.text), len(output.token_ids))
        ]
        queues.append(deltas_of(output, *cuts))
    parts = PartialAnswer()
    shown = ""
    while any(queues):
        # A message has at most one delta of each output.
        chosen = data.draw(st.sets(st.sampled_from([index for index, queue in enumerate(queues) if queue]), min_size=1))
        message = gateway_pb2.GenerateResponse(deltas=[queues[index].pop(0) for index in chosen])
        shown += "".join(delta.text for delta in parts.add(message) if delta.index == 0)
        assert parts.text == shown
    with pytest.raises(BrokenStreamError):
        parts.whole()
    assert parts.add(gateway_pb2.GenerateResponse(completion=COMPLETION)) == []
    assert parts.whole() == answer_of(response)


def test_a_warming_is_its_progress_and_its_end() -> None:
    parts, progress = PartialWarm(), gateway_pb2.WarmProgress(prompt_tokens=9, computed_tokens=4)
    begun = [parts.begun]
    assert list(parts.add(gateway_pb2.WarmResponse(progress=progress))) == [progress]
    assert [*begun, parts.begun] == [False, True]
    with pytest.raises(BrokenStreamError):
        parts.whole()
    assert list(parts.add(gateway_pb2.WarmResponse(completion=COMPLETION))) == []
    assert parts.whole() == COMPLETION
