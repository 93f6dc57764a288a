"""An S3-compatible server of a test's own, on the loopback interface."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def serving_store(bucket: str) -> Iterator[str]:
    """The URL of a bucket that lives as long as this block.

    A test that lacks the server or its client is skipped.
    """
    pytest.importorskip("moto")
    files = pytest.importorskip("s3fs").S3FileSystem
    port = _free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (
        pytest.MonkeyPatch.context() as environment,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server,
    ):
        environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            environment.setenv(name, "testing")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        files.clear_instance_cache()  # of a server that another test had
        try:
            _wait_for(server, port)
            files().mkdir(bucket)
            yield f"s3://{bucket}"
        finally:
            server.kill()
            files.clear_instance_cache()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _wait_for(server: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(300):
        with socket.socket() as door:
            if door.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert server.poll() is None, "the server of the test has ended: another took its port"
        time.sleep(0.1)
    raise AssertionError(f"the server of the test gives no answer at port {port}")
