"""What is kept of the workers' answers to the operator, in front of a worker that answers when the test says."""

import asyncio
from types import SimpleNamespace
from typing import Any

from prefixgate.gateway.worker_surveys import WorkerSurveys
from prefixgate.proto import worker_pb2


def test_an_answer_that_is_overtaken_takes_no_total_back() -> None:
    async def test() -> None:
        asked = asyncio.Event()
        drawn: asyncio.Future[worker_pb2.WorkerSurvey] = asyncio.get_running_loop().create_future()

        async def survey(request: worker_pb2.SurveyRequest, **_: float) -> worker_pb2.WorkerSurvey:
            if not request.max_cells:
                return worker_pb2.WorkerSurvey(queried_tokens=110)
            asked.set()
            return await drawn

        stub = SimpleNamespace(Survey=survey)
        client = SimpleNamespace(is_ready=True, connection=SimpleNamespace(stub=stub))
        fleet: Any = SimpleNamespace(members=lambda: (SimpleNamespace(address="w", client=client),))
        surveys = WorkerSurveys(fleet)
        looking = asyncio.create_task(surveys.ask(8))
        await asked.wait()
        while "w" not in surveys.totals:
            await surveys.ask()
        # Of before the other answer, and later than it.
        drawn.set_result(worker_pb2.WorkerSurvey(queried_tokens=100, map=worker_pb2.PoolMap(stride=1)))
        await looking
        while "w" not in surveys.maps:
            await surveys.ask(8)
        assert surveys.maps["w"].survey.queried_tokens == 100
        assert surveys.totals["w"].survey.queried_tokens == 110

    asyncio.run(test())
