"""Methods as design.md sketches them, a few lines each: the core must be able to host every one."""

from __future__ import annotations

import copy

import torch
from pydantic import Field
from torch.func import functional_call

from fedcore import Loss, Plugin, PluginOptions, hookimpl
from fedcore.functional import effective_steps, linear_term, proximal_term


def _parameters(client):
    return {name: parameter.detach().clone() for name, parameter in client.model.named_parameters()}


class Scaffold(Plugin):
    """SCAFFOLD, Option II in units of A(K); the server derives dc_i from the update alone."""

    uses_displacement = True

    @hookimpl
    def broadcast(self, server):
        return {name: server.state[name] for name in server.state}

    @hookimpl
    def begin_local(self, client):
        start = client.scratch["start"] = _parameters(client)
        zero = {name: torch.zeros_like(w) for name, w in start.items()}
        c, c_i = {**zero, **client.received}, {**zero, **client.state}
        client.scratch["correction"] = [c[name] - c_i[name] for name in start]

    @hookimpl
    def local_loss(self, step):
        return Loss(linear_term(step.parameters, step.client.scratch["correction"]), name="correction")

    @hookimpl
    def end_local(self, client):
        scale = client.lr * effective_steps(client.steps, client.momentum)
        trained, start = _parameters(client), client.scratch["start"]
        for (name, y), correction in zip(trained.items(), client.scratch["correction"]):
            client.state[name] = (start[name] - y) / scale - correction

    @hookimpl
    def weight(self, update):
        return 1.0

    @hookimpl
    def accumulate(self, server, update):
        scale = update.lr * effective_steps(update.steps, update.momentum)
        for name, w in server.model.items():
            c = server.state.get(f"old {name}", server.state.get(name, torch.zeros_like(w)))
            server.state[f"old {name}"] = c
            server.state[name] = (
                server.state.get(name, torch.zeros_like(w))
                + ((w - update.model[name]) / scale - c) / server.num_clients
            )

    @hookimpl
    def server_step(self, server, mean):
        for name in mean:
            del server.state[f"old {name}"]
        return mean


class AlphaOptions(PluginOptions):
    alpha: float = Field(1.0, gt=0)
    linear: bool = True


class FedDyn(Plugin):
    """FedDyn: <-g_i, w> + alpha/2 |w - w_t|^2; w_{t+1} = mean - h / alpha."""

    Options = AlphaOptions
    server_optimizer = True
    uses_displacement = True

    @hookimpl
    def begin_local(self, client):
        start = client.scratch["start"] = _parameters(client)
        client.scratch["g"] = [client.state.get(name, torch.zeros_like(w)) for name, w in start.items()]

    @hookimpl
    def local_loss(self, step):
        return [
            Loss(linear_term(step.parameters, step.client.scratch["g"]), weight=-1.0, name="linear"),
            Loss(proximal_term(step.parameters, step.reference), weight=self.options.alpha, name="quadratic"),
        ]

    @hookimpl
    def end_local(self, client):
        start = client.scratch["start"]
        for (name, y), g in zip(_parameters(client).items(), client.scratch["g"]):
            client.state[name] = g - self.options.alpha * (y - start[name])

    @hookimpl
    def weight(self, update):
        return 1.0

    @hookimpl
    def server_step(self, server, mean):
        new, share = {}, len(server.accepted) / server.num_clients
        for name, y in mean.items():
            h = server.state.get(name, torch.zeros_like(y)) - self.options.alpha * share * (y - server.model[name])
            server.state[name] = h
            new[name] = y - h / self.options.alpha
        return new


class FedDC(Plugin):
    """FedDC: alpha/2 |w - (w_t - h_i)|^2 + <s - s_i, w>; w_{t+1} = mean y + mean over all h_i."""

    Options = AlphaOptions
    server_optimizer = True
    uses_displacement = True

    @hookimpl
    def broadcast(self, server):
        return {name: server.state[name] for name in server.state if name.startswith("s.")}

    @hookimpl
    def begin_local(self, client):
        start = client.scratch["start"] = _parameters(client)

        def kept(kind, source):
            return [source.get(f"{kind}.{name}", torch.zeros_like(w)) for name, w in start.items()]

        client.scratch["h"] = kept("h", client.state)
        client.scratch["ds"] = [s - own for s, own in zip(kept("s", client.received), kept("s", client.state))]

    @hookimpl
    def local_loss(self, step):
        target = [w - h for w, h in zip(step.reference, step.client.scratch["h"])]
        terms = [Loss(proximal_term(step.parameters, target), weight=self.options.alpha, name="drift")]
        if self.options.linear:
            terms.append(Loss(linear_term(step.parameters, step.client.scratch["ds"]), name="gradient"))
        return terms

    @hookimpl
    def end_local(self, client):
        scratch, up = client.scratch, {}
        scale = client.lr * effective_steps(client.steps, client.momentum)
        for (name, y), h, ds in zip(_parameters(client).items(), scratch["h"], scratch["ds"]):
            moved = y - scratch["start"][name]
            client.state[f"h.{name}"] = h + moved
            new = -moved / scale - ds
            up[f"s.{name}"] = new - client.state.get(f"s.{name}", torch.zeros_like(y))
            client.state[f"s.{name}"] = new
        return up

    @hookimpl
    def weight(self, update):
        return 1.0

    @hookimpl
    def accumulate(self, server, update):
        for name in list(update.payload):
            change = update.payload.pop(name) / server.num_clients
            server.state[name] = server.state.get(name, torch.zeros_like(change)) + change

    @hookimpl
    def server_step(self, server, mean):
        new, share = {}, len(server.accepted) / server.num_clients
        for name, y in mean.items():
            h = server.state.get(f"h.{name}", torch.zeros_like(y)) + share * (y - server.model[name])
            server.state[f"h.{name}"] = h
            new[name] = y + h
        return new


class FedNova(Plugin):
    """FedNova: weights n_i / a_i, and two sums; w_{t+1} = w_t - tau_eff * sum p_i d_i."""

    server_optimizer = True

    @hookimpl
    def weight(self, update):
        return update.samples / effective_steps(update.steps, update.momentum)

    @hookimpl
    def accumulate(self, server, update):
        a = effective_steps(update.steps, update.momentum)
        n, times, over = server.state.get("sums", [0.0, 0.0, 0.0])
        server.state["sums"] = [n + update.samples, times + update.samples * a, over + update.samples / a]

    @hookimpl
    def server_step(self, server, mean):
        n, times, over = server.state.pop("sums")
        factor = (times / n) * (over / n)
        if factor == 1.0:
            return mean
        return {name: server.model[name] + factor * (m - server.model[name]) for name, m in mean.items()}


class MomentumOptions(PluginOptions):
    beta: float = Field(0.9, ge=0, lt=1)
    lr: float = Field(1.0, gt=0)


class FedAvgM(Plugin):
    """FedAvgM, heavy ball: mean + (1 - lr) d - lr beta v_old."""

    Options = MomentumOptions
    neutral = {"beta": 0.0, "lr": 1.0}
    server_optimizer = True

    @hookimpl
    def server_step(self, server, mean):
        beta, lr, new = self.options.beta, self.options.lr, {}
        for name, m in mean.items():
            d, v = server.model[name] - m, server.state.get(name, torch.zeros_like(m))
            server.state[name] = beta * v + d
            new[name] = m + (1 - lr) * d - lr * beta * v
        return new


class Pull(Plugin):
    """A task whose gradient is -1 in round 0 and -0.5 afterwards: the client moves by so much at lr 1."""

    @hookimpl
    def task_loss(self, step):
        return -step.logits.mean(dim=0).sum() * (1.0 if step.round == 0 else 0.5)


class DittoOptions(PluginOptions):
    lam: float = Field(1.0, ge=0)
    start: float | None = None


class Ditto(Plugin):
    """Ditto: v_i on CE(v) + lambda/2 |v - w_t|^2 beside the training of w."""

    Options = DittoOptions

    @hookimpl
    def begin_local(self, client):
        start = _parameters(client)
        if self.options.start is not None:
            start = {name: torch.full_like(w, self.options.start) for name, w in start.items()}
        client.add_parameters({name: client.state.get(name, w) for name, w in start.items()})

    @hookimpl
    def local_loss(self, step):
        with step.random("personal"):
            logits = functional_call(step.model, dict(step.added), (step.x,)).logits
        if step.logits.shape[1] == 2:
            task = 0.5 * (logits - step.x.flatten(1)).pow(2).sum(dim=1).mean()
        else:
            task = torch.nn.functional.cross_entropy(logits, step.y)
        near = proximal_term(list(step.added.values()), step.reference)
        return [Loss(task, name="personal"), Loss(near, weight=self.options.lam, name="near")]

    @hookimpl
    def end_local(self, client):
        for name, v in client.added.items():
            client.state[name] = v.detach()

    @hookimpl
    def personal_model(self, client):
        own = copy.deepcopy(client.model)
        own.load_state_dict({**own.state_dict(), **client.state})
        return own


class PatternOptions(PluginOptions):
    patterns: list[str] = ["classifier.*"]


class FedPer(Plugin):
    """FedPer: the classifier stays on the client."""

    Options = PatternOptions

    @hookimpl
    def personal_parameters(self, model):
        return self.options.patterns


class Solo(Plugin):
    """SOLO: everything stays on the client."""

    @hookimpl
    def personal_parameters(self, model):
        return ["*"]
