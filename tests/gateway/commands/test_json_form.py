import json

from prefixgate.gateway.commands.json_form import json_form
from prefixgate.proto import gateway_pb2, generation_pb2


def test_numbers_stay_numbers_and_names_stay_as_they_are() -> None:
    message = gateway_pb2.CompleteResponse(
        outputs=[gateway_pb2.Output(text="é", token_ids=[1], finish_reason=generation_pb2.FINISH_REASON_STOP)],
        completion=gateway_pb2.Completion(usage=generation_pb2.Usage(prompt_tokens=1 << 53)),
    )
    form = json.loads(json.dumps(json_form(message)))
    assert form["outputs"][0]["finish_reason"] == "FINISH_REASON_STOP"
    assert form["outputs"][0]["token_ids"] == [1]
    assert form["outputs"][0]["index"] == 0
    assert form["completion"]["usage"]["prompt_tokens"] == 1 << 53
    assert form["prompt_logprobs"] == []


def test_what_is_not_set_is_null() -> None:
    form = json_form(gateway_pb2.GenerateRequest(prompt="hi"))
    assert form["prompt"] == "hi"
    assert (form["chat"], form["n"], form["sampling"]) == (None, None, None)


def test_maps_are_objects() -> None:
    assert json_form(generation_pb2.SamplingParams(logit_bias={3: -1.5}))["logit_bias"] == {3: -1.5}
