"""LoRAs that a machine has received: assembled by their hashes, and linked for vLLM's parts."""

import hashlib
from pathlib import Path

from trainer.machines.lora_files import NAMES, Hashes, LoraStore


def receive(store: LoraStore, *contents: bytes) -> Hashes:
    for content in contents:
        store.receive(content)
    digests = [hashlib.sha256(content).hexdigest() for content in contents]
    return dict(zip(NAMES, digests, strict=True))


def test_a_lora_is_complete_only_with_the_files_that_were_announced(tmp_path: Path) -> None:
    store = LoraStore(tmp_path)
    hashes = receive(store, b"{}", b"weights")
    damaged = {**hashes, NAMES[1]: hashlib.sha256(b"other weights").hexdigest()}
    assert store.complete(damaged) == [NAMES[1]]
    assert store.complete(hashes) == []
    assert (store.path(hashes) / NAMES[1]).read_bytes() == b"weights"


def test_a_link_lasts_as_long_as_its_lora(tmp_path: Path) -> None:
    link = tmp_path / "links" / "step-1"
    stores = [LoraStore(tmp_path / name) for name in ("first", "second")]  # on the same disk
    paths = []
    for store in stores:
        hashes = receive(store, b"{}", b"weights")
        store.complete(hashes)
        paths.append(store.path(hashes))
        store.link(paths[-1], link)
    assert link.resolve() == paths[0]
    stores[1].delete(paths[1])
    assert link.resolve() == paths[0]
    stores[0].delete(paths[0])
    assert not link.parent.exists()


def test_a_dangling_link_is_replaced_and_all_links_go_at_the_end(tmp_path: Path) -> None:
    store = LoraStore(tmp_path / "store")
    links = [tmp_path / "links" / name for name in ("a", "b")]
    links[0].parent.mkdir()
    links[0].symlink_to(tmp_path / "gone")
    for number, link in enumerate(links):
        hashes = receive(store, b"{}", b"weights %d" % number)
        store.complete(hashes)
        store.link(store.path(hashes), link)
    assert all(link.resolve().is_dir() for link in links)
    store.unlink()
    assert not links[0].parent.exists()
