# SPDX-License-Identifier: Apache-2.0
"""The hosts file: what is accepted, and what each mistake is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from p4reduce.errors import ConfigError
from p4reduce_controller.hosts import Host, Hosts, SwitchConfig, load, parse, synthetic_mac

SWITCH = """
[switch]
grpc = "127.0.0.1:9559"
profile = "w34"
ip = "10.0.0.254"
mac = "02:70:34:00:00:FE"
"""
HOST = """
[[host]]
name = "h1"
ip = "10.0.0.1"
mac = "02:70:34:00:00:01"
port = 1
"""
SECOND = HOST.replace("h1", "h2").replace("10.0.0.1", "10.0.0.2").replace(":01", ":02").replace("port = 1", "port = 2")


def test_a_good_file() -> None:
    hosts = parse(SWITCH + HOST + SECOND, "lab.toml")
    assert hosts.switch == SwitchConfig("127.0.0.1:9559", "w34", "10.0.0.254", "02:70:34:00:00:fe", 0)
    assert hosts.hosts[1] == Host("h2", "10.0.0.2", "02:70:34:00:00:02", 2)
    assert hosts.by_ip("10.0.0.2") is hosts.hosts[1]
    assert hosts.by_ip("10.0.0.3") is None
    assert hosts.endpoint(hosts.hosts[0]) == ("10.0.0.254", 20532)
    assert not hosts.loopback
    assert (hosts.hosts[0].ip_number, hosts.hosts[0].mac_number) == (0x0A000001, 0x027034000001)


def test_the_switch_has_a_name() -> None:
    assert parse(SWITCH + HOST).switch.name == "s1"
    assert parse(SWITCH + 'name = "rack 7"' + HOST).switch.name == "rack 7"


def test_endpoints_make_the_mac_optional() -> None:
    text = SWITCH + '[[host]]\nname = "a"\nip = "127.0.1.1"\nport = 1\nendpoint = "127.0.0.1:40001"\n'
    hosts = parse(text)
    assert hosts.hosts[0].mac == "02:70:7f:00:01:01" == synthetic_mac("127.0.1.1")
    assert hosts.endpoint(hosts.hosts[0]) == ("127.0.0.1", 40001)
    assert hosts.loopback


def test_loopback_needs_an_endpoint_and_a_loopback_address_everywhere() -> None:
    text = SWITCH + '[[host]]\nname = "a"\nip = "127.0.1.1"\nport = 7\nendpoint = "127.0.0.1:40001"\n'
    assert parse(text).loopback
    assert not parse(text + HOST).loopback
    with pytest.raises(
        ConfigError, match=r"\(h1\): endpoint is for UDP ports of the embedded switch.*ip is 10\.0\.0\.1"
    ):
        parse(SWITCH + HOST + 'endpoint = "127.0.0.1:40001"\n')


def test_a_switch_behind_a_unix_socket() -> None:
    hosts = parse(SWITCH.replace("127.0.0.1:9559", "unix:/run/switch.sock") + HOST)
    assert hosts.switch.grpc == "unix:/run/switch.sock"


def test_embedded_hosts() -> None:
    hosts = Hosts.embedded("127.0.0.1:9", {2: ("127.0.0.1", 42), 1: ("127.0.0.1", 41)}, profile="w5")
    assert [(h.ip, h.port, h.endpoint) for h in hosts.hosts] == [
        ("127.0.1.1", 1, ("127.0.0.1", 41)),
        ("127.0.1.2", 2, ("127.0.0.1", 42)),
    ]
    assert hosts.loopback
    assert hosts.switch.profile == "w5"


MISTAKES = {
    "no switch": (HOST, "[switch] is missing"),
    "no host": (SWITCH, "no [[host]] entry"),
    "host as a table": (SWITCH + HOST.replace("[[host]]", "[host]"), "two brackets"),
    "not toml": (SWITCH + "port = = 1", "not valid TOML"),
    "unknown section": (SWITCH + HOST + "[hots]\n", "unknown key hots"),
    "unknown switch key": (SWITCH + "grcp = 1" + HOST, "[switch]: unknown key grcp"),
    "unknown host key": (SWITCH + HOST + "prot = 1", "host 1 (h1): unknown key prot"),
    "profile": (SWITCH.replace("w34", "w35") + HOST, "profile 'w35' is unknown: choose one of w5, w34"),
    "grpc": (SWITCH.replace("127.0.0.1:9559", "localhost") + HOST, "grpc must be ADDRESS:PORT"),
    "grpc port": (SWITCH.replace(":9559", ":0") + HOST, "grpc must be ADDRESS:PORT"),
    "device id": (SWITCH + "device_id = -1" + HOST, "device_id must be from 0"),
    "device id type": (SWITCH + "device_id = true" + HOST, "device_id must be a whole number, not True"),
    "switch ip": (SWITCH.replace("10.0.0.254", "10.0.0.256") + HOST, "[switch]: ip '10.0.0.256' is not an IPv4"),
    "switch name": (SWITCH + 'name = ""' + HOST, "[switch]: name must be a text that is not empty"),
    "long switch name": (SWITCH + f'name = "{"x" * 65}"' + HOST, "must be up to 64 printable characters"),
    "odd switch name": (SWITCH + 'name = "a\\u001b[31m"' + HOST, "[switch]: name 'a\\x1b[31m' must be up to 64"),
    "blank host name": (SWITCH + HOST.replace('"h1"', '" h1"'), "name ' h1' must be up to 64 printable characters"),
    "no name": (SWITCH + HOST.replace('name = "h1"', ""), "host 1: name is missing"),
    "empty name": (SWITCH + HOST.replace("h1", ""), "name must be a text that is not empty"),
    "ip": (SWITCH + HOST.replace("10.0.0.1", "10.0.1"), "host 1 (h1): ip '10.0.1' is not an IPv4 address"),
    "group ip": (SWITCH + HOST.replace("10.0.0.1", "224.0.0.1"), "not the address of one host"),
    "no mac": (SWITCH + HOST.replace("mac", "#"), "host 1 (h1): mac is missing"),
    "mac": (SWITCH + HOST.replace("02:70:34:00:00:01", "02:70:34:00:01"), "is not a MAC address"),
    "mac digits": (SWITCH + HOST.replace("02:70:34:00:00:01", "02:70:34:00:00:0g"), "is not a MAC address"),
    "group mac": (SWITCH + HOST.replace("02:70:34:00:00:01", "03:70:34:00:00:01"), "a group address"),
    "port 0": (SWITCH + HOST.replace("port = 1", "port = 0"), "port must be from 1 to 510, not 0"),
    "port 511": (SWITCH + HOST.replace("port = 1", "port = 511"), "port must be from 1 to 510, not 511"),
    "port type": (SWITCH + HOST.replace("port = 1", 'port = "1"'), "port must be a whole number, not '1'"),
    "no port": (SWITCH + HOST.replace("port = 1", ""), "host 1 (h1): port is missing"),
    "endpoint": (SWITCH + HOST + 'endpoint = "127.0.0.1"', "endpoint must be ADDRESS:PORT"),
    "endpoint ip": (SWITCH + HOST + 'endpoint = "here:1"', "endpoint 'here' is not an IPv4 address"),
    "same port": (SWITCH + HOST + SECOND.replace("port = 2", "port = 1"), "host h1 and host h2 have the same port 1"),
    "same name": (SWITCH + HOST + SECOND.replace("h2", "h1"), "have the same name h1"),
    "same ip": (SWITCH + HOST + SECOND.replace("10.0.0.2", "10.0.0.1"), "have the same ip 10.0.0.1"),
    "same mac": (SWITCH + HOST + SECOND.replace(':02"', ':01"'), "have the same mac 02:70:34:00:00:01"),
    "switch's ip": (SWITCH + HOST.replace("10.0.0.1", "10.0.0.254"), "[switch] and host h1 have the same ip"),
    "switch's mac": (SWITCH + HOST.replace(':01"', ':fe"'), "[switch] and host h1 have the same mac"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_name_file_entry_and_remedy(name: str) -> None:
    text, expected = MISTAKES[name]
    with pytest.raises(ConfigError) as caught:
        parse(text, "lab.toml")
    assert str(caught.value).startswith("lab.toml: ")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_hosts_must_not_share_an_endpoint() -> None:
    endpoint = 'endpoint = "127.0.0.1:40001"\n'
    with pytest.raises(ConfigError, match="have the same endpoint"):
        parse((SWITCH + HOST + endpoint + SECOND + endpoint).replace('ip = "10.0.0.', 'ip = "127.0.1.'))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml: cannot read the hosts file: No such file"):
        load(tmp_path / "nothing.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read the hosts file"):
        load(binary)


def test_load_names_the_path(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(SWITCH + HOST)
    assert load(path).source == str(path)
    assert load(str(path)) == load(path)
