#!/usr/bin/env bash
# A unit test of a Flower app can no longer make the messages that the app makes: the constructor needs a running task.
#
# Seen with flwr 1.42.0, public names only. One would guess: flwr.app.Message is a value, as RecordDict is, and a test may
# call a ServerApp with a stand-in for its Grid, which is an abstract class for this purpose. It was so up to 1.37.0,
# where run and node of such a message were 0 until the SuperLink set them. Since 1.38.0 the constructor reads the ids of
# the task from the state of the process, which only Flower's own processes have set. It raises RuntimeError. The
# constructor's documentation does not say so, and no public name sets the ids.
#
# Output seen:
#   flwr 1.37.0: the app sent {'lr': 0.1} to nodes [7, 8]
#   flwr 1.42.0: RuntimeError: TaskIdentity.run_id is not set.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cat > "$place/test_app.py" <<'PY'
from importlib.metadata import version

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    content = RecordDict({"options": ConfigRecord({"lr": 0.1})})
    grid.push_messages([Message(content, dst_node_id=node, message_type="train") for node in grid.get_node_ids()])


class Stub(Grid):
    """A grid for tests: it keeps what an app sends."""

    sent: list[Message] = []
    run = None

    def set_run(self, run): ...
    def create_message(self, *arguments, **named): ...
    def get_node_ids(self):
        return [7, 8]

    def push_messages(self, messages):
        self.sent.extend(messages)
        return [str(number) for number in range(len(self.sent))]

    def pull_messages(self, message_ids):
        return []

    def send_and_receive(self, messages, *, timeout=None):
        return []


context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
try:
    app(grid=Stub(), context=context)
    options = dict(Stub.sent[0].content["options"])
    print(f"flwr {version('flwr')}: the app sent {options} to nodes {[m.metadata.dst_node_id for m in Stub.sent]}")
except RuntimeError as error:
    print(f"flwr {version('flwr')}: {type(error).__name__}: {error}")
PY
for version in 1.37.0 1.42.0; do
  python3 -m venv "$place/$version"
  "$place/$version/bin/pip" install --quiet "flwr==$version"
  FLWR_TELEMETRY_ENABLED=0 "$place/$version/bin/python" "$place/test_app.py"
done | tee "$place/seen"
grep -q "^flwr 1.37.0: the app sent {'lr': 0.1} to nodes \[7, 8\]$" "$place/seen"
grep -q "^flwr 1.42.0: RuntimeError: TaskIdentity" "$place/seen"
