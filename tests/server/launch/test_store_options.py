"""The flags of `pdserve store`, and those of a store that `pdserve up` starts."""

import pytest

from pdserve.common.errors import StartupError
from pdserve.server.cli import main, make_parser
from pdserve.server.launch.ports import check_port
from pdserve.server.launch.store_options import parse_memory, read_store_options, take_local_store
from pdserve.transfer.store.client import StoreError, connect


@pytest.mark.parametrize(("text", "size"), [("512MiB", 512 << 20), ("8GiB", 8 << 30), ("1.5GiB", 3 << 29)])
def test_memory_sizes_are_parsed(text: str, size: int) -> None:
    assert parse_memory(text, "--memory") == size


@pytest.mark.parametrize("text", ["8", "8GB", "1MiB", "-1GiB", ""])
def test_wrong_memory_is_refused(text: str) -> None:
    with pytest.raises(StartupError, match=r"--memory .*: give a size of at least 16MiB"):
        parse_memory(text, "--memory")


def test_defaults_of_a_store() -> None:
    options = read_store_options(make_parser().parse_args(["store"]))
    assert (options.host, options.port, options.memory_bytes, options.join) == ("127.0.0.1", 50051, 4 << 30, None)


def test_url_of_a_store() -> None:
    def url(*flags: str) -> str:
        return read_store_options(make_parser().parse_args(["store", *flags])).url

    assert url("--host", "10.0.0.5") == "mooncake://10.0.0.5:50051"
    assert url("--join", "mooncake://10.0.0.5:1") == "mooncake://10.0.0.5:1"
    assert url("--etcd", "a:2379,b:2379") == "etcd://a:2379,b:2379"


def test_wrong_url_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "--join", "127.0.0.1:50051"]) == 2
    assert "give mooncake://HOST:PORT" in capsys.readouterr().err
    assert main(["store", "--etcd", "http://127.0.0.1:2379"]) == 2
    assert "give HOST:PORT[,HOST:PORT...]" in capsys.readouterr().err
    assert main(["store", "--etcd", "127.0.0.1:2379", "--join", "etcd://127.0.0.1:2379"]) == 2
    assert "give one of them" in capsys.readouterr().err
    assert main(["prefill", "--kv-store", "127.0.0.1:50051"]) == 2
    assert "kv_store" in capsys.readouterr().err
    assert main(["prefill", "--kv-store", "mooncake://127.0.0.1:50051", "--no-prefix-cache"]) == 2
    assert "kv_store needs prefix_cache" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["prefill", "--kv-store", "etcd://a:99999,b:2379"],
        ["prefill", "--kv-store", "etcd://a:2379,b:0"],
        ["prefill", "--kv-store", "mooncake://a:65536"],
        ["store", "--join", "etcd://a:2379,b:65536"],
        ["store", "--join", "etcd://a:65536,b:2379"],
        ["store", "--join", "mooncake://a:0"],
        ["store", "--etcd", "a:2379,b:65536"],
        ["store", "--etcd", "a:65536,b:2379"],
    ],
    ids=" ".join,
)
def test_wrong_port_of_a_store_or_etcd_server_is_refused(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    _, flag, value = flags
    assert main(flags) == 2
    field = "kv_store" if flag == "--kv-store" else flag
    error = capsys.readouterr().err
    assert error.startswith(f"pdserve: error: {field}: the port must be between 1 and 65535, got {value!r}"), error


def test_endpoint_without_a_port_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "--join", "etcd://a,b:2379"]) == 2
    assert "give mooncake://HOST:PORT or etcd://HOST:PORT[,...]" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
@pytest.mark.parametrize("port", ["0", "-1", "65536"])
def test_wrong_port_is_refused(capsys: pytest.CaptureFixture[str], flag: str, port: str) -> None:
    """Mooncake would hang, or listen on another port."""
    assert main(["store", flag, port]) == 2
    assert capsys.readouterr().err == f"pdserve: error: {flag} must be 1 to 65535, got {port!r}\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "50052"], "--port and --metrics-port are both 50052: choose different ports"),
        (
            ["--host", "0.0.0.0"],
            "--host '0.0.0.0' is a wildcard address: give the one at which servers reach this machine",
        ),
        (["--memory", "1000TiB"], "--memory 1000TiB: this machine has "),
    ],
)
def test_unusable_store_settings_are_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    """Mooncake would hang for minutes, or register memory at an address that servers cannot reach."""
    assert main(["store", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"pdserve: error: {message}")


def test_invalid_host_name_is_refused() -> None:
    with pytest.raises(StartupError, match=r"^host a\.\.b is not an address of this machine: "):
        check_port("a..b", 50051, "--port")
    with pytest.raises(StoreError, match=r"^no server of mooncake://a\.\.b:1 answers "):
        connect("mooncake://a..b:1", "127.0.0.1", segment_bytes=0)


def test_up_starts_a_store_for_a_size_but_not_for_a_url() -> None:
    flags: dict[str, str | bool] = {"kv_store": "256MiB"}
    store = take_local_store(flags)
    assert store is not None
    assert store.memory_bytes == 256 << 20
    assert flags["kv_store"] == f"mooncake://127.0.0.1:{store.port}"
    assert take_local_store(flags) is None
    assert take_local_store({}) is None
