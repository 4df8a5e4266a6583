"""How a store is pointed at a server: everything by the standard AWS chain, and nothing of it to be seen afterwards."""

import io
import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from posttrain_core.errors import ConfigError, StoreError
from posttrain_core.store import ObjectStore, open_store
from posttrain_core.store.probe import check_conditional_writes
from tests.conftest import BUCKET
from tests.radosgw import ACCESS_KEY, SECRET_KEY

SECRETS = ("AKIAVISIBLE", "very-secret", "session-token")


def works(store: ObjectStore) -> bool:
    store.put("key", b"x")
    return store.get("key") == b"x"


@pytest.mark.parametrize("url", ["s3:///prefix", "s3://", "s3://bucket/prefix?endpoint=x", "s3://bucket/prefix#x"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"s3://bucket/prefix.*AWS_ENDPOINT_URL_S3"):
        open_store(url)


def test_a_url_that_holds_credentials_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="holds no credentials") as caught:
        open_store("s3://AKIAVISIBLE:very-secret@bucket/prefix")
    assert not any(secret in str(caught.value) for secret in SECRETS)


def test_a_prefix_cannot_leave_the_bucket(rados_url: str) -> None:
    with pytest.raises(StoreError, match="not a store key"):
        open_store(f"s3://{BUCKET}/a/../b")


def test_an_endpoint_that_holds_credentials_is_refused(rados_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://AKIAVISIBLE:very-secret@127.0.0.1:1")
    with pytest.raises(ConfigError, match="endpoint") as caught:
        open_store(rados_url)
    assert not any(secret in str(caught.value) for secret in SECRETS)


def test_tls_with_an_authority_of_ones_own(
    rados_url: str, rados_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", rados_environment["TLS_ENDPOINT"])
    monkeypatch.setenv("AWS_CA_BUNDLE", rados_environment["TLS_CA"])
    store = open_store(rados_url)
    assert works(store)
    check_conditional_writes(store)
    data = bytes(20 << 20)  # in parts
    (tmp_path / "up").write_bytes(data)
    store.put_file("large", tmp_path / "up")
    assert store.get("large") == data
    monkeypatch.delenv("AWS_CA_BUNDLE")
    stranger = open_store(rados_url)
    stranger._sleep = lambda seconds: None  # type: ignore[attr-defined]
    with pytest.raises(StoreError, match="Check AWS_CA_BUNDLE"):
        stranger.get("key")


def test_a_profile_brings_credentials_region_endpoint_and_addressing_style(
    rados_url: str, rados_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    endpoint = rados_environment["AWS_ENDPOINT_URL_S3"]
    (tmp_path / "config").write_text(
        f"[profile mine]\nregion = eu-west-3\nendpoint_url = {endpoint}\n"
        "[profile virtual]\nregion = eu-west-3\ns3 =\n    addressing_style = virtual\n"
    )
    keys = f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    (tmp_path / "credentials").write_text(f"[mine]\n{keys}[virtual]\n{keys}")
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    store = open_store(rados_url)
    assert works(store)
    assert signed_url(store).startswith(f"{endpoint}/{BUCKET}/")
    monkeypatch.setenv("AWS_PROFILE", "virtual")
    assert signed_url(open_store(rados_url)).startswith(f"https://{BUCKET}.s3.eu-west-3.amazonaws.com/")
    monkeypatch.setenv("AWS_PROFILE", "absent")
    with pytest.raises(ConfigError, match=r"absent"):
        open_store(rados_url)


def signed_url(store: Any) -> str:
    url: str = store._client.generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": "key"})
    return url


class Role(BaseHTTPRequestHandler):
    """The end of a container's role."""

    def do_GET(self) -> None:
        keys = {"AccessKeyId": SECRETS[0], "SecretAccessKey": SECRETS[1], "Token": SECRETS[2]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(keys | {"Expiration": "2100-01-01T00:00:00Z"}).encode())

    def log_message(self, *_: Any) -> None:
        return


def test_a_role_brings_credentials(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On moto, which believes any credentials: the point is that there are some."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with ThreadingHTTPServer(("127.0.0.1", 0), Role) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{server.server_port}/")
        assert works(open_store(s3_url))
        server.shutdown()


def test_no_credentials_at_all(rados_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreError, match="Set AWS_PROFILE"):
        open_store(rados_url).get("key")


def test_bytes_that_were_changed_on_their_way_are_refused(rados_url: str) -> None:
    store: Any = open_store(rados_url)
    store._sleep = lambda seconds: None
    store._client.meta.events.register("before-call.s3.PutObject", flip_a_bit)
    with pytest.raises(StoreError, match=r"BadDigest|InvalidDigest"):
        store.put("key", b"whole")
    assert store.stat("key") is None


def flip_a_bit(params: dict[str, Any], **_: Any) -> None:
    params["body"] = io.BytesIO(params["body"].read().replace(b"whole", b"whols"))


def test_the_probe_accepts_the_server_and_refuses_a_versioned_bucket(rados_url: str, rados_client: Any) -> None:
    check_conditional_writes(open_store(rados_url), num_writers=8)
    rados_client.create_bucket(Bucket="versioned")
    rados_client.put_bucket_versioning(Bucket="versioned", VersioningConfiguration={"Status": "Enabled"})
    with pytest.raises(StoreError, match=r"put-if-absent overwrote an object.*without object versioning"):
        check_conditional_writes(open_store("s3://versioned"))


def test_credentials_are_in_no_error_log_or_repr(
    rados_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", SECRETS[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRETS[1])
    monkeypatch.setenv("AWS_SESSION_TOKEN", SECRETS[2])
    store = open_store(rados_url)
    texts = [repr(store), str(store), store.url]
    for call in (
        lambda: store.get("key"),
        lambda: store.put("key", b"x"),
        lambda: store.put_if_absent("key", b"x"),
        lambda: list(store.list("")),
    ):
        with pytest.raises(StoreError, match="Check the credentials") as caught:
            call()
        texts += [str(caught.value), repr(caught.value), repr(caught.value.__cause__), str(caught.value.__cause__)]
    for text in (*texts, caplog.text):
        assert not any(secret in text for secret in SECRETS), text
