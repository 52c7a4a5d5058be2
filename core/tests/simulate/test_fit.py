"""`bench fit` against a server whose step cost is known."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from enginectl.cli import main
from enginectl.errors import EnginectlError
from enginectl.simulate.cost import fit_cost
from enginectl.simulate.fit import Server, budget_of, measure

BASE_S, ROW_S, TOKEN_S, BUDGET = 0.008, 0.002, 0.0001, 128


class Pretender(BaseHTTPRequestHandler):
    """Sleeps as long as each step would take."""

    protocol_version = "HTTP/1.1"
    num_open = 0
    lock = threading.Lock()

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        info = {"engine": {"max_num_batched_tokens": BUDGET}}
        self._json({"data": [{"id": "m", "max_model_len": 300}]} if self.path == "/v1/models" else info)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.headers.get("authorization") != "Bearer k":
            self._json({"error": "no key"}, 401)
            return
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        with self.lock:
            Pretender.num_open += 1
        left = len(body["prompt"])
        while left > 0:
            time.sleep(BASE_S + ROW_S + TOKEN_S * min(left, BUDGET))
            left -= BUDGET
        for _ in range(body["max_tokens"] - 1):
            self.wfile.write(b"data: {}\n\n")
            self.wfile.flush()
            time.sleep(BASE_S + (ROW_S + TOKEN_S) * self.num_open)
        self.wfile.write(b"data: {}\n\ndata: [DONE]\n\n")
        with self.lock:
            Pretender.num_open -= 1

    def _json(self, value: object, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pretender) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_cost_of_a_server_is_found(url: str) -> None:
    server = Server(url, api_key="k")
    assert (server.model, server.max_model_len, budget_of(server)) == ("m", 300, BUDGET)
    probes = measure(
        server, batch_sizes=(1, 4), prompt_lens=(32, 256, 4000), num_output=12, repeats=2,
        max_num_batched_tokens=BUDGET,
    )  # fmt: skip
    assert {(p.num_steps, p.rows, p.tokens) for p in probes} == {(1, 1, 1), (1, 4, 4), (1, 1, 32), (2, 1, 256)}
    cost, explained = fit_cost(*zip(*((p.num_steps, p.rows, p.tokens, p.seconds) for p in probes), strict=True))
    predicted = cost.seconds(4, 4)
    assert predicted == pytest.approx(BASE_S + 4 * (ROW_S + TOKEN_S), rel=0.4)
    assert explained > 0.7


def test_the_command_writes_what_simulate_reads(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cost.json"
    line = f"bench fit {url}/v1 --api-key k --batch-sizes 1,2 --prompt-lens 32,64 --repeats 1 -o {path}"
    assert main(line.split()) == 0
    assert "a step takes" in capsys.readouterr().out
    assert main(f"simulate --cost {path} --num-requests 5 --output-tokens 3".split()) == 0


def test_a_server_that_refuses_is_quoted(url: str) -> None:
    with pytest.raises(EnginectlError, match=r"401.*no key"):
        Server(url).stream(3, 3)
