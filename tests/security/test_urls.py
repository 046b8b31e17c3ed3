"""A Redis URL that cannot be used is refused at once, and none of it that is secret is shown."""

from __future__ import annotations

import traceback

import pytest

from mlxq.producer import Producer
from mlxq.protocol.servers import connection_options
from mlxq.worker.config import BadConfig, Config

SECRET = "hunter2"
BAD = [
    "hunter2",
    "http://u:hunter2@host",
    "u:hunter2@host:6379",
    "redis://u:hunter2@host:port",
    "redis://u:hunter2@host:99999999",
    "redis://u:12/hunter2@host",  # for a URL parser this is port 12 of the host u
    "redis://u:12?hunter2@host",
    "redis://u:12#hunter2@host",
    "redis://hunter2/x@host",
    "redis://u:[hunter2]@host",
    "redis://u:hunter2\u2100@host",
    "redis://u:hunter2@host/0?socket_timeout=soon",
    "redis://u:hunter2@host/0?unknown=1",
    "redis://u:hunter2@host/0?timeout=1",  # of a pool that waits, which none here is
    "rediss://u:hunter2@host?ssl_cert_reqs=perhaps",
    "rediss://u:hunter2@host?ssl_ca_certs=/nowhere/ca.pem",
    "redis+sentinel://u:12/hunter2@host/master",
    "redis+sentinel://u:hunter2@host",
    "redis+sentinel://u:hunter2@host:x/master",
    "redis+sentinel://u:[hunter2]@host/master",
    "redis+sentinel://u:a@host/master?sentinel_password=hunter2&socket_timeout=soon",
    "redis+cluster://u:hunter2@host/1",
    "redis+cluster://u:hunter2@host?unknown=1",
    "redis+else://u:hunter2@host",
]


@pytest.mark.parametrize("url", BAD)
def test_a_bad_url_is_refused_without_its_secret(url: str) -> None:
    with pytest.raises(ValueError, match="^bad Redis URL") as refused:
        Producer(url)
    with pytest.raises(BadConfig, match="^--redis: bad Redis URL") as told:
        Config(model="m", redis_url=url)
    for error in (refused.value, told.value):
        assert SECRET not in "".join(traceback.format_exception(error))


@pytest.mark.parametrize("kind", ["redis://", "rediss://", "redis+sentinel://", "redis+cluster://"])
def test_a_password_may_have_any_character_in_its_written_form(kind: str) -> None:
    master = "/master" if "sentinel" in kind else ""
    options = connection_options(f"{kind}u:a%2Fb%3Fc%23d%40e%3A%25@host{master}", "key")
    assert options["password"] == "a/b?c#d@e:%"
    assert options["username"] == "u"


def test_certificates_reach_the_nodes_that_are_asked_for_the_server() -> None:
    """Sentinels and cluster nodes are asked with the same trust as the server itself."""
    for url in ("rediss+sentinel://host/master", "rediss+cluster://host"):
        options = connection_options(f"{url}?ssl_ca_certs={__file__}", "key")
        assert options["ssl_ca_certs"] == __file__
        assert options["locator"]._login["ssl_ca_certs"] == __file__
        assert options["locator"]._login["ssl"] is True


def test_what_holds_a_url_does_not_show_it() -> None:
    url = f"redis://u:{SECRET}@host"
    config, producer = Config(model="m", redis_url=url), Producer(url)
    for shown in (repr(config), str(config), repr(producer), repr(vars(producer))):
        assert SECRET not in shown
