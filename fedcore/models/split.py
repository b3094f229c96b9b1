"""The structure of every model: encoder and classifier. The task for which plugins configure it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from runpy import run_module
from types import CellType, FrameType, FunctionType, ModuleType, NoneType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from fedcore.base.errors import PluginConflictError
from fedcore.base.seeding import derive_seed, random_stream
from fedcore.base.tensors import digest_of
from fedcore.data.task import CLASSIFICATION, Task

PROJECTION_WIDTH = 256

Model = TypeVar("Model", bound=nn.Module)


class Outputs(NamedTuple):
    """Features and logits of a batch."""

    features: Tensor
    """encoder(x), (B, d)."""
    logits: Tensor
    """classifier(features), (B, C)."""


class SplitModel(nn.Module):
    """An encoder and a classifier; all methods read features and logits through this split.

    Methods also call the classifier by itself, so that logits have to be ``classifier(features)``.

    Override :meth:`make_classifier` for a model with another head, or set ``classifier``: a run then starts from that
    head, with its weights.

    :param base: maps a batch of inputs to features of shape (B, feature_dim).
    :param feature_dim: d, the width of the features.
    :param num_classes: C, the width of the logits.
    """

    encoder: nn.Sequential
    """``base``, then ``projection`` once :meth:`ModelTask.ensure_projection` added it.

    Plugins append to it: ``model.encoder.add_module("bias", Bias(model.feature_dim))``.
    """
    classifier: nn.Module
    """Starts as one linear layer. A plugin may replace it, or move layers between encoder and classifier; it then sets
    ``feature_dim``."""

    def __init__(self, base: nn.Module, feature_dim: int, num_classes: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(OrderedDict(base=base))
        self.num_classes = num_classes
        self.projection_width: int | None = None
        self.renew_classifier(feature_dim)

    def forward(self, x: Any) -> Outputs:
        """Return features and logits of a batch of the kind that ``base`` takes, such as images (B, C, H, W)."""
        features = self.encoder(x)  # (B, d)
        return Outputs(features, self.classifier(features))

    def make_classifier(self, feature_dim: int) -> nn.Module:
        """Return a freshly initialised head, (B, feature_dim) -> (B, num_classes)."""
        return nn.Linear(feature_dim, self.num_classes)

    def renew_classifier(self, feature_dim: int) -> None:
        """Put a fresh head on features of the given width."""
        self.feature_dim = feature_dim
        self.classifier = self.make_classifier(feature_dim)
        # nn.Module does not register a tuple's content as a submodule, and deepcopy keeps it the same object.
        self._made, self._fresh = (self.classifier,), self._classifier_state()

    @property
    def has_own_classifier(self) -> bool:
        """Whether the classifier is the module that :meth:`renew_classifier` made."""
        return self.classifier is self._made[0]

    @property
    def has_fresh_classifier(self) -> bool:
        """Whether nobody replaced, changed, froze or hooked the classifier, so that renewing it discards nothing."""
        return self.has_own_classifier and self._fresh == self._classifier_state()

    def _classifier_state(self) -> tuple[str, str]:
        """Return the form of the classifier, to which hooks belong, and the hash of its values."""
        hooks = [len(v) for m in self.classifier.modules() for name, v in vars(m).items() if name.endswith("_hooks")]
        trained = [(name, p.requires_grad, bool(p._backward_hooks)) for name, p in self.classifier.named_parameters()]
        state = self.classifier.state_dict()
        values = {name: tensor for name, tensor in state.items() if not (tensor.is_meta or is_lazy(tensor))}
        return str((hooks, trained)), digest_of(values)

    def network(self) -> nn.Module:
        """Return a copy of the network that the model was made of, with the present weights.

        For a network that was split, it is of the network's own class. A model that was made as encoder and classifier
        is copied as it is.

        :raises ConfigError: a plugin or ``--projection`` gave the model layers that the network does not have.
        """
        return copied(self)

    def file_names(self) -> dict[str, str]:
        """Return the names of the model's tensors in files of weights, by their names in the model.

        They are the names of :meth:`network`, so that its class loads the file.
        """
        return {name: name for name in self.state_dict()}


@dataclass(frozen=True, slots=True)
class ModelTask:
    """The task of a model, and the tools for building modules: an argument of ``configure_model(model, task)``."""

    num_classes: int
    """C, the width of the logits."""
    input_shape: tuple[int, ...]
    """Shape of one input, without the batch; other kinds of data than tensors define their own."""
    seed: int
    """The run's seed."""
    kind: Task = CLASSIFICATION
    """What the model learns to predict."""
    _reshaped: list[str] = field(default_factory=list, init=False)

    def reshape_classifier(self, plugin: str) -> None:
        """Note that a plugin gives the classifier another form; two plugins of a run cannot.

        :raises PluginConflictError: names both.
        """
        if self._reshaped:
            raise PluginConflictError.of(self._reshaped[0], plugin, "both reshape the classifier")
        self._reshaped.append(plugin)

    def random(self, purpose: str) -> AbstractContextManager[None]:
        """Return a context in which weights are drawn from (seed, purpose), independent of earlier draws.

        The purpose names the part of the model, not the plugin: two plugins that build the same part start from the
        same weights, and a run without them has the same base.
        """
        return random_stream(derive_seed(self.seed, purpose))

    def ensure_projection(self, model: SplitModel, width: int = PROJECTION_WIDTH) -> None:
        """Append the projection head unless the model has it, and renew the classifier on top of it.

        Linear(d, d), ReLU, Linear(d, width), without a final ReLU: the features are then z, (B, width). The dtype is
        that of the former classifier.

        :raises PluginConflictError: the model already has a head of another width, or the model's factory or a plugin
            has replaced, hooked or frozen the classifier, which would be discarded.
        :source: MOON (Li, He, Song, CVPR 2021, arXiv 2103.16257), ``l1`` and ``l2`` of its code.
        """
        if model.projection_width == width:
            return
        if model.projection_width is not None:
            raise PluginConflictError(
                f"a projection head of width {width} is requested, but the model already has one of width "
                f"{model.projection_width}. Hint: give every plugin that projects the same width."
            )
        if not model.has_own_classifier or model._fresh[0] != model._classifier_state()[0]:
            raise PluginConflictError(
                f"a projection head of width {width} is requested, but the model's factory or a plugin has replaced, "
                f"hooked or frozen the classifier, a {type(model.classifier).__name__}, which would be discarded. "
                "Hint: if a plugin did, list the plugin that projects first, or use --projection; if the factory did, "
                "override make_classifier(feature_dim) in its SplitModel instead of setting classifier."
            )
        d = model.feature_dim
        with keeping_dtype(model), self.random("projection"):
            layers = OrderedDict(l1=nn.Linear(d, d), relu=nn.ReLU(), l2=nn.Linear(d, width))
            model.encoder.add_module("projection", nn.Sequential(layers))
            model.projection_width = width
            with self.random("classifier"):
                model.renew_classifier(width)


@contextmanager
def keeping_dtype(model: SplitModel) -> Iterator[None]:
    """Give what a block adds to a model in float32 the dtype of its present classifier, if that has parameters."""
    dtype = next((parameter.dtype for parameter in model.classifier.parameters()), None)
    before = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}  # alive, or ids are used again
    yield
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in before and tensor.dtype == torch.float32:
            tensor.data = tensor.data.to(dtype=dtype)


def frozen_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules with parameters of which none requires gradients. Training leaves them in eval mode."""
    return [module for module in model.modules() if {p.requires_grad for p in module.parameters()} == {False}]


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether a module that is not frozen is a BatchNorm: of 1 to 3 dimensions, synchronised or lazy."""
    frozen = {part for module in frozen_modules(model) for part in module.modules()}
    return any(isinstance(module, _BatchNorm) for module in model.modules() if module not in frozen)


def smallest_batch(model: nn.Module, sample: Any) -> int:
    """Return the number of samples that a training batch needs: 2 if BatchNorm finds one value per channel in one.

    :param sample: a batch with one sample.
    """
    if not has_batch_norm(model):
        return 1
    with suppress(Exception), torch.no_grad(), random_stream(0):  # torch raises ValueError, other code anything
        training_copy(model)(sample)
        return 1
    return 2


def training_copy(model: Model) -> Model:
    """Return a copy in the mode in which clients train the model: frozen modules stay in eval mode."""
    own = copied(model).train()
    nn.ModuleList(frozen_modules(own)).eval()
    return own


def gradient_hooks(model: nn.Module) -> list[tuple[Any, Any]]:
    """Return the hooks on gradients of each parameter, of both kinds, which neither deepcopy nor pickle takes along."""
    return [(p._backward_hooks, p._post_accumulate_grad_hooks) for p in model.parameters()]


def copied(model: Model, *, share: bool = False, hooks: Iterable[tuple[Any, Any]] = ()) -> Model:
    """Return a copy of a model that computes with its own layers, also of a model that holds tensors of a graph.

    Layers that compute their weights, such as pruned ones, hold such tensors, which deepcopy refuses. It leaves
    functions as they are, so that hooks of the copy would use the model's layers, and a scripted module's copy passes
    gradients on to the module.

    :param share: let the copy have the model's own parameters and buffers.
    :param hooks: those on gradients, if the model has lost them on its way to another process.
    """
    held = [value for part in model.modules() for value in vars(part).values() if not isinstance(value, _SHARED)]
    copies: dict[Any, Any] = {id(t): t.detach() for t in held if isinstance(t, Tensor) and not t.is_leaf}
    tensors = (*model.parameters(), *model.buffers())
    copies["parts"] = {id(part) for part in (*held, *model.modules(), *tensors)}
    copies |= {id(tensor): tensor for tensor in tensors if share}
    with torch.no_grad():
        own: Model = _COPY["deepcopy"](model, copies)
        for before, after, kept in zip(model.parameters(), own.parameters(), hooks or gradient_hooks(model)):
            if after is not before:
                after.requires_grad_(before.requires_grad)
                after._backward_hooks, after._post_accumulate_grad_hooks = _COPY["deepcopy"](kept, copies)
    return own


def _bound(value: Any, copies: dict[Any, Any]) -> Any:
    """Return a function or weak reference for a copy: itself, or one that leads to the copies of the model's parts."""

    def own(held: Any) -> Any:
        return _COPY["deepcopy"](held, copies) if _leads_to(copies["parts"], held) else held

    if not _leads_to(copies["parts"], value):
        return value
    if isinstance(value, weakref.ref):
        return weakref.ref(own(value()))
    cells = tuple(CellType() for _ in value.__closure__ or ())
    bound = copies[id(value)] = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
    bound.__defaults__, bound.__kwdefaults__ = own(value.__defaults__), own(value.__kwdefaults__)
    vars(bound).update(own(vars(value)))
    for cell, before in zip(cells, value.__closure__ or ()):
        with suppress(ValueError):  # of an empty cell: a name that its function has not bound
            cell.cell_contents = own(before.cell_contents)
    return bound


def _leads_to(parts: Collection[int], value: Any) -> bool:
    """Return whether a value is a part of a model, by its id, or holds one."""
    seen, held = dict[int, Any](), [value]
    while held and id(value := held.pop()) not in parts:
        # What the garbage collector does not track holds nothing that it tracks.
        if id(value) not in seen and gc.is_tracked(value) and not isinstance(value, _APART):
            seen[id(value)] = value
            if isinstance(value, FunctionType):  # it also refers to all names of its module
                held += [value.__closure__ or (), value.__defaults__, value.__kwdefaults__, vars(value)]
            else:
                held += [value()] if isinstance(value, weakref.ref) else gc.get_referents(value)
    return id(value) in parts


_APART = (type, ModuleType, FrameType, Tensor)
"""Types of values that refer to much, and are no way to a part of a model."""
_SHARED = (NoneType, bool, int, float, str, tuple, type, FunctionType, torch.jit.ScriptFunction, ModuleType)
"""Types of values that models may share without being parts of each other."""
_COPY = run_module("copy")
"""A copy module of our own, whose deepcopy reaches functions, scripted ones and weak references."""
_COPY.get("_atomic_types", set()).difference_update({FunctionType, weakref.ref})  # since Python 3.14
_COPY["_deepcopy_dispatch"].update(dict.fromkeys((FunctionType, weakref.ref, torch.jit.ScriptFunction), _bound))


def copied_for_calls(model: Model) -> Model | None:
    """Return a copy whose calls write nothing that calls of the model read; None if there is none.

    Forward hooks may write to an object that the copy's hooks would still share with the model.
    """
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    with suppress(Exception):  # third-party code can hold what cannot be copied
        return None if hooked else copied(model)
    return None


_OF_TORCH = vars(nn.Module()).keys()
"""The attributes that every module has."""


class PlainAttributes:
    """What a network keeps outside of its state: plain attributes of its own modules, and buffers that are not saved.

    What a forward pass keeps in them, such as a hidden state, would go on to the next client of the process.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parts = [part for part in model.modules() if not type(part).__module__.startswith("torch.")]
        """The modules whose class is none of torch's."""
        self._first = [{name: (value, _content(value)) for name, value in own.items()} for own in self.now()]
        self.unsaved: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        """The buffers that the model's state lacks: each one's module and name, itself, and its values at first."""
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name in module._non_persistent_buffers_set:
                    buffer = module._buffers[name] = buffer.contiguous()  # an expanded one cannot be written
                    self.unsaved.append((module, name, buffer, buffer.clone()))

    def now(self) -> list[dict[str, Any]]:
        """Return the present attributes of each part."""
        return [{name: own for name, own in vars(part).items() if name not in _OF_TORCH} for part in self.parts]

    def restore(self) -> None:
        """Give the modules the values that they had at first: the same objects, with the same content."""
        for part, first, now in zip(self.parts, self._first, self.now(), strict=True):
            for name in now.keys() - first.keys():
                del vars(part)[name]
            for name, (value, content) in first.items():
                vars(part)[name] = value
                if isinstance(value, Tensor):
                    value.detach().copy_(content)
                elif content is not None:
                    value.clear()
                    (value.update if isinstance(value, (dict, set)) else value.extend)(content)
        for module, name, buffer, values in self.unsaved:
            current = getattr(module, name)
            if current is None or current.shape == values.shape:  # else a cache, which the model made longer
                module._buffers[name] = buffer.copy_(values)


def _content(value: Any) -> Any:
    """Return a copy of what code may edit in place in a value; None for other types."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    # Not their subclasses, which may refuse to be changed.
    return copy.copy(value) if type(value) in (list, dict, set, deque, OrderedDict, defaultdict, Counter) else None


@contextmanager
def tried(model: nn.Module) -> Iterator[None]:
    """Try a model in eval mode in a block; afterwards its modules have the attributes that they had.

    A network may keep values from call to call, and a trial is no call of the run. Lazy modules become real ones.
    """
    plain = PlainAttributes(model)
    try:
        with torch.no_grad(), evaluating(model):
            yield
    finally:
        plain.restore()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode for a block; afterwards every module has the mode it had, frozen parts too."""
    before = [(module, module.training) for module in model.modules()]
    if any(training for _, training in before):  # a switch takes as long as a step of a small model
        model.eval()
    try:
        yield
    finally:
        for module, training in before:  # parents first: a module's switch reaches its children
            if module.training != training:
                module.train(training)
