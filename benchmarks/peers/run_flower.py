"""Flower's simulation (flwr[simulation], Ray): one actor per core, each with one CPU and so one thread.

Favourable: the local loop is the user's and is our gather-and-slice one, no DataLoader; data are read once per actor;
no evaluation on clients; run_simulation in this process instead of ``flwr run``, which starts a SuperLink first.
"""

from __future__ import annotations

import sys
from pathlib import Path

import exported
from exported import Job, Stopwatch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

client_app = ClientApp()
FOLDER = Path(sys.argv[1])


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train one client in an actor."""
    # Ray sends this function by value; what the module ``exported`` keeps stays in the actor.
    workload, model = exported.load(FOLDER), exported.worker_model(FOLDER)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    number = int(context.node_config["partition-id"])
    workload.train(model, number)
    metrics = MetricRecord({"num-examples": len(workload.holds[number])})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


def main() -> None:
    """Run the simulation."""
    job = Job.from_command_line()
    workload, watch = exported.load(job.folder), Stopwatch(job)
    model = workload.model()
    server_app = ServerApp()

    def after_round(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        if number == 0:
            watch.begin()
            return None
        if job.evaluates(number):
            model.load_state_dict(arrays.to_torch_state_dict())
        watch.round_trained(model)
        return None

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=workload.settings["participation"],
            fraction_evaluate=0.0,
            # In 1.42 the share is of the nodes that are connected when it first looks: none.
            min_train_nodes=round(workload.settings["participation"] * workload.settings["clients"]),
            min_available_nodes=workload.settings["clients"],
        )
        strategy.start(
            grid, ArrayRecord(model.state_dict()), job.rounds, train_config=ConfigRecord(), evaluate_fn=after_round
        )

    run_simulation(
        server_app,
        client_app,
        num_supernodes=workload.settings["clients"],
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": job.cores, "_temp_dir": str(job.folder / "ray")},
        },
    )
    watch.report()


if __name__ == "__main__":
    main()
