import re
import subprocess
import sys
from pathlib import Path

from tests.served import Served

README = Path(__file__).parents[2] / "README.md"
ADDRESS = '"127.0.0.1:8050"'


def example() -> str:
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    return str(blocks[0])


def test_the_readmes_client_runs_as_it_stands(tmp_path: Path) -> None:
    program = example()
    assert len([line for line in program.splitlines() if line.strip()]) <= 20
    imported = set(re.findall(r"^(?:import|from) (\S+)", program, re.MULTILINE))
    assert imported == {"grpc", "prefixgate.proto"}
    assert ADDRESS in program
    with Served(tmp_path, "--model", "witness", "--blocks", "128") as served:
        served.wait_until_ready()
        command = [sys.executable, "-c", program.replace(ADDRESS, repr(served.address))]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert result.stderr == ""
        answers = re.findall(
            r"^(.{10,})\n\[(\d+) of (\d+) prompt tokens came from the cache\]$", result.stdout, re.MULTILINE
        )
        assert len(answers) == 2
        (_, cold, _), (_, warm, prompt) = answers
        # The second question shares the system prompt with the first, one token for each byte in this model.
        assert int(cold) == 0
        assert 100 < int(warm) < int(prompt)
        assert served.stop() == 0
