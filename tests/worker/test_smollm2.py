"""The embedded model on the real path: it answers, and a hit changes nothing of what it says.

The first run on a machine downloads and converts the model, into the same cache folder that a worker uses.
"""

from collections.abc import Sequence

import jinja2
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from prefixgate.cache.hashing import BLOCK_SIZE, BlockHasher, CacheScope
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.config.cache_settings import CacheSettings
from prefixgate.config.settings import WorkerSettings
from prefixgate.gateway.chat_template import ChatTemplate
from prefixgate.gateway.detokenizer import Detokenizer, TokenPieces
from prefixgate.gateway.tokenizer import ModelTokenizer
from prefixgate.worker.conversion import cache_folder
from prefixgate.worker.embedded import embedded_folder
from prefixgate.worker.engine import Engine
from prefixgate.worker.limits import Limits
from prefixgate.worker.loader import load_runner
from prefixgate.worker.model_folder import load_model
from prefixgate.worker.model_runner import ModelRunner
from prefixgate.worker.observations import Observations
from prefixgate.worker.outbox import News
from prefixgate.worker.probe import stock_logits
from prefixgate.worker.request import Request, SamplingParams

pytestmark = pytest.mark.timeout(900)  # the first run downloads 93 MB and converts them

NUM_BLOCKS = 256
MAX_TOKENS = 10
SYSTEM = (
    "You are the assistant of a small public library. You answer questions of visitors in one short sentence. You are "
    "friendly and exact, you do not guess, and where you do not know an answer you say so and send the visitor to the "
    "information desk beside the entrance."
)
QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Italy?",
    "How many days are in a week?",
    "What colour is the sky?",
    "What is two plus two?",
    "Who wrote Romeo and Juliet?",
    "What is the opposite of hot?",
    "Which planet do we live on?",
    "What do bees make?",
    "In which season does it snow?",
)


class Listener:
    """Keeps the tokens of each call."""

    def __init__(self) -> None:
        self.heard: dict[Request, list[int]] = {}

    def deliver(self, step: int, news: Sequence[News]) -> None:
        for item in news:
            for token_ids in item.token_ids.values():
                self.heard.setdefault(item.request, []).extend(token_ids)


class Worker:
    """An engine with an empty cache over the loaded model."""

    def __init__(self, runner: ModelRunner) -> None:
        runner.storage.poison(range(NUM_BLOCKS))
        cache = PrefixCache(NUM_BLOCKS, BlockHasher(bytes(16)))
        self.engine = Engine(runner, cache, Limits(256, 16, 100), Observations(["acme"]), poison=True)
        self.listener = Listener()

    def ask(self, prompts: Sequence[list[int]], max_tokens: int = MAX_TOKENS) -> list[Request]:
        """Serve prompts side by side, greedily."""
        scope = CacheScope("acme", "smollm2@1")
        requests = [Request(prompt, scope, SamplingParams(max_tokens), self.listener) for prompt in prompts]
        for request in requests:
            self.engine.submit(request)
        while self.engine.step():
            pass
        return requests

    def answers(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        return [self.listener.heard[request] for request in self.ask(prompts)]


def encode(runner: ModelRunner, messages: list[dict[str, str]]) -> list[int]:
    """Turn a chat into token ids."""
    text = runner.spec.text
    rendered = jinja2.Template(text.chat_template).render(messages=messages, add_generation_prompt=True)
    ids: list[int] = Tokenizer.from_str(text.tokenizer.decode()).encode(rendered, add_special_tokens=False).ids
    return ids


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    settings = WorkerSettings(model="smollm2", device="cpu", dtype="float32", threads=1)
    return load_runner(settings, CacheSettings(blocks=NUM_BLOCKS), lambda line: None)


@pytest.fixture(scope="module")
def prompts(runner: ModelRunner) -> list[list[int]]:
    system = {"role": "system", "content": SYSTEM}
    return [encode(runner, [system, {"role": "user", "content": question}]) for question in QUESTIONS]


@pytest.fixture(scope="module")
def fresh(runner: ModelRunner, prompts: list[list[int]]) -> list[list[int]]:
    """What each prompt is answered with, alone on a worker that has seen nothing."""
    return [Worker(runner).answers([prompt])[0] for prompt in prompts]


def test_the_capital_of_france_is_paris(runner: ModelRunner) -> None:
    answer = Worker(runner).answers([encode(runner, [{"role": "user", "content": QUESTIONS[0]}])])[0]
    tokenizer = Tokenizer.from_str(runner.spec.text.tokenizer.decode())
    assert tokenizer.decode(answer) == "The capital of France is Paris."


def test_the_model_itself_would_say_the_same(prompts: list[list[int]], fresh: list[list[int]]) -> None:
    stock = load_model(embedded_folder(cache_folder(), lambda line: None), torch.device("cpu"), torch.float32)
    for prompt, answer in zip(prompts, fresh, strict=True):
        following = stock_logits(stock, [*prompt, *answer])[len(prompt) - 1 : -1].argmax(dim=1)
        assert following.tolist() == answer


CHATS: list[list[tuple[str, str]]] = [
    [("user", QUESTIONS[0])],
    [("system", SYSTEM), ("user", QUESTIONS[1]), ("assistant", "Rome."), ("user", "  And   of Spain?\n\n")],
    [("user", "\U0001f469\u200d\U0001f467\U0001f3fd e\u0301 \u05e9\u05dc\u05d5\u05dd \u202eabc\u202c \ufffd A\0B")],
    [("assistant", ""), ("user", "def f(x):\r\n\treturn {'a': x ** 2}  # 10,000,000 <|im_ \ue000\U000f0000")],
]


def test_the_gateway_reads_and_writes_text_as_the_models_own_library_does(runner: ModelRunner) -> None:
    text = runner.spec.text
    library = transformers.AutoTokenizer.from_pretrained(embedded_folder(cache_folder(), lambda line: None))
    tokenizer, template = ModelTokenizer(text.tokenizer), ChatTemplate(text.chat_template, text.template_tokens)
    pieces = TokenPieces(tokenizer)
    for messages in CHATS:
        chat = [{"role": role, "content": content} for role, content in messages]
        expected = library.apply_chat_template(chat, tokenize=True, add_generation_prompt=True, return_dict=False)
        shielded = [{name: tokenizer.shield(said) for name, said in message.items()} for message in chat]
        assert tokenizer.encode_rendered(template.render(shielded, max_characters=100_000)) == expected
        said, detokenizer = messages[-1][1], Detokenizer(pieces)
        written = "".join(map(detokenizer.push, tokenizer.encode_prompt(said))) + detokenizer.flush()
        assert written == said


def test_a_hit_changes_no_word(runner: ModelRunner, prompts: list[list[int]], fresh: list[list[int]]) -> None:
    shared = min(
        next(i for i, (mine, first) in enumerate(zip(prompt, prompts[0], strict=False)) if mine != first)
        for prompt in prompts[1:]
    )
    worker = Worker(runner)
    worker.ask([prompts[0]], max_tokens=1)
    requests = worker.ask(prompts)
    assert [worker.listener.heard[request] for request in requests] == fresh
    assert all(request.usage.cached_tokens >= shared // BLOCK_SIZE * BLOCK_SIZE for request in requests)
    assert requests[0].usage.cached_tokens == len(prompts[0]) - 1
