"""Test the command `python -m kvjax.serve`."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from kvjax.cli.launch import parse_command
from kvjax.errors import UserError
from kvjax.serve.__main__ import ServeConfig, run


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def ask(port, path, body=None):
    call = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(call):
        call.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        reply = call.getresponse()
        return reply.status, reply.read().decode()


@pytest.mark.slow
def test_the_server_prints_what_fits_and_finishes_answers_at_sigterm():
    port = free_port()
    options = f"--port {port} --policy streaming_llm:sink=4,window=252 --slots 2 --max-length 1024 --chunk 256".split()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvjax.serve", *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"KVJAX_API_KEY": ""},
    )  # fmt: skip
    try:
        ready = False
        while not ready:
            assert process.poll() is None, process.communicate()
            with contextlib.suppress(ConnectionRefusedError):
                ready = ask(port, "/health")[0] == 200
            time.sleep(0.2)
        body = {"prompt": "Once upon a time", "max_tokens": 300, "logit_bias": {"0": -100}}
        with socket.create_connection(("127.0.0.1", port)) as call:
            text = json.dumps(body)
            head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
            call.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode())
            while "kvjax_requests_running 1.0" not in ask(port, "/metrics")[1]:
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            reply = b"".join(iter(lambda: call.recv(1 << 16), b""))
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "Requests of 1,024 tokens that fit: 2, with a full cache 0." in out
    assert f"listening on http://127.0.0.1:{port}/v1" in out
    assert "Warming up with prompts of 64 tokens" in out
    assert "Ready after" in out
    assert "Traceback" not in errors


def test_missing_packages_are_reported_in_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(UserError, match=r"the server needs uvicorn: pip install 'kvjax\[serve\]'"):
        run(parse_command(ServeConfig, []))


def test_invalid_options_are_refused_before_the_model_is_loaded():
    def refused(*options):
        with pytest.raises(UserError) as error:
            run(parse_command(ServeConfig, options))
        return str(error.value)

    assert "a server can only split heads" in refused("--mesh", "8")
    assert "must be a whole number" in refused("--slots", "0")
    assert "at most 65535" in refused("--port", "99999")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "already in use" in refused("--port", str(taken.getsockname()[1]))


@pytest.mark.slow
def test_a_pool_without_room_for_a_request_is_refused():
    """As with 30 for 30%."""
    options = ["--capacity", "30", "--max-length", "1024", "--port", str(free_port())]
    with pytest.raises(UserError, match="--capacity 30: a request of 1,024 tokens does not fit"):
        run(parse_command(ServeConfig, options))
