"""An address at which no cluster answers is an error within seconds, in one line that says what to write instead."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
import ray
from ray._private.utils import check_version_info

from rex_ray.core.errors import ConfigError
from rex_ray.train import reaching
from rex_ray.train.preflight import connected
from rex_ray.train.reaching import connect


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster but the one that is named, and no call of ``ray.init`` that comes to nothing."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(reaching.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(reaching.ray, "init", lambda **_: pytest.fail("Ray would be asked, for minutes"))


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(reaching.services, "resolve_ip_for_localhost", lambda host: host)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (":6379", r"no Ray cluster at :6379 \(that is not HOST:PORT\); set it to HEAD:6379"),
        ("head", r"\(that is not HOST:PORT\)"),
        ("head:", r"\(that is not HOST:PORT\)"),
        ("http://127.0.0.1:8265", r"\(that is an address for `ray job` and browsers\).*8265 is the dashboard's"),
        ("no.such.host.invalid:6379", r"\(nobody answers at no.such.host.invalid:6379: "),
    ],
)
def test_an_address_that_cannot_be_one_is_refused_at_once(address: str, said: str) -> None:
    begun_s = time.monotonic()
    with pytest.raises(ConfigError, match=said) as raised:
        connect(address)
    assert "\n" not in str(raised.value)
    assert time.monotonic() - begun_s < 10


def test_a_port_where_nobody_listens_is_refused_at_once_whoever_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{closed_port()}"
    with pytest.raises(ConfigError, match=rf"no Ray cluster at {address} \(nobody answers at .*refused\); set it to"):
        connect(address)
    monkeypatch.setenv("RAY_ADDRESS", address)
    for given in (None, "auto"):
        with pytest.raises(ConfigError, match=rf"at RAY_ADDRESS={address} \(nobody answers .*; or unset it"):
            connect(given)
    with (
        pytest.raises(ConfigError, match=r"or look at this machine alone with --address local"),
        connected(None),
    ):
        pass


def test_what_listens_and_is_no_head_is_asked_once(monkeypatch: pytest.MonkeyPatch, listening: str) -> None:
    asked = []

    def init(**options: object) -> None:
        asked.append((options["address"], reaching.os.environ[reaching._ATTEMPTS]))
        raise ConnectionError("Failed to connect to Ray cluster\nmore")

    monkeypatch.setattr(reaching.ray, "init", init)
    with pytest.raises(ConfigError, match=r"\(Failed to connect to Ray cluster\); set it to HEAD:6379"):
        connect(listening)
    assert asked == [(listening, "1")]
    assert reaching._ATTEMPTS not in reaching.os.environ


def test_a_cluster_of_other_versions_is_one_and_is_told_whole(monkeypatch: pytest.MonkeyPatch, listening: str) -> None:
    def init(**_: object) -> None:
        versions = {"ray_version": "1.0.0", "python_version": "2.7.0"}
        check_version_info(versions, "this machine")

    monkeypatch.setattr(reaching.ray, "init", init)
    with pytest.raises(
        ConfigError, match=r"^the Ray cluster at 127.* takes no process like this one \(Version mis"
    ) as it:
        connect(listening)
    assert "Ray: 1.0.0 Python: 2.7.0" in str(it.value)
    assert ray.__version__ in str(it.value)
    assert "\n" not in str(it.value)


def test_why_ray_could_not_connect_is_told(monkeypatch: pytest.MonkeyPatch, listening: str) -> None:
    causes = [
        RuntimeError("No node info found matching attributes: '10.0.0.9'"),
        RuntimeError("Failed to connect to GCS. Last connection error: Traceback (most recent call last):\n ..."),
    ]

    def init(**_: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster") from causes.pop(0)

    monkeypatch.setattr(reaching.ray, "init", init)
    for said in ("No node info found matching attributes: '10.0.0.9'", "Failed to connect to Ray cluster"):
        with pytest.raises(ConfigError, match=rf"no Ray cluster at 127.* \({said}\); set it"):
            connect(listening)


def test_without_an_address_a_cluster_is_started_here_and_its_own_errors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: object) -> None:
        assert options == {"address": None}
        assert reaching._ATTEMPTS not in reaching.os.environ  # a head that starts needs its time
        raise RuntimeError("no room for an object store")

    monkeypatch.setattr(reaching.services, "canonicalize_bootstrap_address", lambda address: None)
    monkeypatch.setattr(reaching.ray, "init", init)
    with pytest.raises(RuntimeError, match="no room for an object store"):
        connect()


@pytest.mark.parametrize("address", ["ray://head:10001", "somebodys://cluster"])
def test_a_client_of_ray_and_a_scheme_of_somebodys_are_left_to_ray(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    called: list[dict[str, object]] = []
    monkeypatch.setattr(ray, "init", lambda **options: called.append(options))
    connect(address, log_to_driver=False)
    assert called == [{"address": address, "log_to_driver": False}]
