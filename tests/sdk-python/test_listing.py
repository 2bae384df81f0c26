"""Finding sandboxes: filters, order, pages."""

import datetime
import uuid

import pytest
from conftest import everything
from e2b import Sandbox, SandboxQuery, SandboxState


@pytest.fixture(scope="module")
def crowd(template):
    """Five sandboxes of one group, the first of them paused."""
    group = uuid.uuid4().hex
    boxes = []
    for number in range(5):
        metadata = {"suite": "sdk-python", "group": group, "parity": str(number % 2), "odd key/&=": "a b&c=d%ü"}
        boxes.append(Sandbox.create(template, timeout=900, metadata=metadata))
    boxes[0].pause()
    yield group, boxes
    for box in boxes:
        box.kill()


def ids(items):
    return [item.sandbox_id for item in items]


def test_all_of_a_group_are_found_newest_first(crowd):
    group, boxes = crowd
    found = ids(everything(SandboxQuery(metadata={"group": group})))
    assert found == [box.sandbox_id for box in reversed(boxes)]


def test_labels_must_all_match(crowd):
    group, boxes = crowd
    found = ids(everything(SandboxQuery(metadata={"group": group, "parity": "1"})))
    assert set(found) == {boxes[1].sandbox_id, boxes[3].sandbox_id}
    assert ids(everything(SandboxQuery(metadata={"group": group, "parity": "7"}))) == []


def test_labels_with_any_characters_are_found(crowd):
    group, boxes = crowd
    found = list(everything(SandboxQuery(metadata={"group": group, "odd key/&=": "a b&c=d%ü"})))
    assert len(found) == len(boxes)
    assert found[0].metadata["odd key/&="] == "a b&c=d%ü"


def test_states_are_told_apart(crowd):
    group, boxes = crowd
    query = SandboxQuery(metadata={"group": group}, state=[SandboxState.PAUSED])
    assert ids(everything(query)) == [boxes[0].sandbox_id]
    query = SandboxQuery(metadata={"group": group}, state=[SandboxState.RUNNING])
    assert boxes[0].sandbox_id not in ids(everything(query))
    query = SandboxQuery(metadata={"group": group}, state=[SandboxState.RUNNING, SandboxState.PAUSED])
    assert len(ids(everything(query))) == 5


def test_pages_cover_everything_once(crowd):
    group, boxes = crowd
    pages = Sandbox.list(query=SandboxQuery(metadata={"group": group}), limit=2)
    sizes, seen = [], []
    while pages.has_next:
        items = pages.next_items()
        sizes.append(len(items))
        seen += ids(items)
    assert sizes == [2, 2, 1]
    assert sorted(seen) == sorted(box.sandbox_id for box in boxes)
    assert not pages.has_next


def test_a_listing_goes_on_from_a_token(crowd):
    group, boxes = crowd
    first = Sandbox.list(query=SandboxQuery(metadata={"group": group}), limit=2)
    head = ids(first.next_items())
    rest = Sandbox.list(query=SandboxQuery(metadata={"group": group}), limit=100, next_token=first.next_token)
    tail = ids(rest.next_items())
    assert len(tail) == 3 and not set(head) & set(tail)


def test_order_can_be_turned_round(crowd):
    group, boxes = crowd
    found = ids(everything(SandboxQuery(metadata={"group": group}), order="asc"))
    assert found == [box.sandbox_id for box in boxes]


def test_only_those_started_after_a_time(crowd):
    group, boxes = crowd
    third = boxes[2].get_info().started_at
    query = SandboxQuery(metadata={"group": group}, started_after=third)
    assert set(ids(everything(query))) == {box.sandbox_id for box in boxes[2:]}
    later = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=1)
    assert ids(everything(SandboxQuery(metadata={"group": group}, started_after=later))) == []


def test_only_those_of_a_template(crowd, template):
    group, _ = crowd
    assert len(ids(everything(SandboxQuery(metadata={"group": group}, template=template)))) == 5
    assert ids(everything(SandboxQuery(metadata={"group": group}, template="no-such-template"))) == []
