"""Sockets between processes: who is gone is noticed, who leaves or is only out of reach is not taken for gone."""

import os
import signal
import socket
import sys
import threading
from queue import Queue

import pytest
from started import begin, environment

from mmjax.distributed.peer_links import PeerLinks, own_address

PEER = """
import sys, time
from mmjax.distributed.peer_links import PeerLinks
links = PeerLinks("127.0.0.1")
links.open("secret", [])
links.handle("echo", lambda fields, stream: (stream.write(fields["text"].encode()), stream.flush()))
print(links.address, flush=True)
sys.stdin.readline()
while not links._watchers:
    time.sleep(0.05)
links.leave()
"""


@pytest.fixture
def peer():
    process = begin([sys.executable, "-c", PEER], environment(1), stdin=-1)
    yield process, process.stdout.readline().strip()
    process.kill()
    process.communicate()


def links_to(address: str, token: str = "secret") -> PeerLinks:
    links = PeerLinks("127.0.0.1")
    links.open(token, [links.address, address])
    return links


def test_a_killed_process_is_noticed_and_one_that_leaves_is_not(peer):
    process, address = peer
    links, lost = links_to(address), Queue()
    links.watch(1, lost.put)
    with links.request(1, "echo", text="still there") as stream:
        assert stream.read() == b"still there"
    assert lost.empty()
    os.kill(process.pid, signal.SIGKILL)
    assert lost.get(timeout=30) == 1


def test_a_process_that_leaves_in_order_is_not_called_lost(peer):
    process, address = peer
    links, lost = links_to(address), Queue()
    links.watch(1, lost.put)
    (watching,) = [t for t in threading.enumerate() if t.name == "watching"]
    process.communicate("leave\n")
    watching.join(30)
    assert lost.empty()


def test_without_the_runs_token_nothing_is_answered(peer):
    _, address = peer
    with pytest.raises(ConnectionError, match="does not answer echo"):
        links_to(address, "a guess").request(1, "echo", text="secrets")


def test_an_address_is_of_the_network_of_the_coordinator():
    assert own_address("127.0.0.1:1234") == "127.0.0.1"
    if socket.has_dualstack_ipv6():
        assert own_address("[::1]:1234") == "::1"
