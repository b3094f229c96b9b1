"""Causal language models of transformers as encoder and classifier: hidden states, and the layer that gives logits."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcore import ConfigError, SplitModel
from fedcore.models import tried
from fedcore_huggingface.wrapped import OfTransformers
from fedcore_zoo import SplitNetwork, load_torchvision


class CausalFeatures(OfTransformers):
    """A causal language model of transformers without its last layer: tokens (B, L) to hidden states (B, d, L)."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden states at each position; none depends on later tokens."""
        hidden: Tensor = self.network(input_ids=tokens, use_cache=False).logits
        return hidden.transpose(1, 2)


class TokenHead(nn.Linear):
    """The layer from hidden states (B, d, L) to logits (B, V, L)."""

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits at each position."""
        return F.linear(features.transpose(1, 2), self.weight, self.bias).transpose(1, 2)


class TiedHead(nn.Module):
    """The same with the embedding's weight, of which there is one tensor, under the embedding's name.

    :param embedding: a part of the encoder; it is kept without being registered as a part of the head.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self._embedding = (embedding,)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits at each position."""
        return F.linear(features.transpose(1, 2), self._embedding[0].weight).transpose(1, 2)


class CausalModel(SplitNetwork):
    """A causal language model. Its last layer, with the weights that it has, is the classifier.

    :param base: the network with the identity in the place of that layer.
    :param last: that layer's name in ``base``.
    :param embedding: the embedding that shares its weight; None if none does.
    """

    def __init__(self, base: CausalFeatures, layer: nn.Linear, *, last: str, embedding: nn.Embedding | None) -> None:
        super().__init__(base, layer, last=last)
        head: nn.Module = TokenHead(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        if embedding is None:
            for name, parameter in layer.named_parameters():
                setattr(head, name, parameter)
        else:
            head = TiedHead(embedding)
        self.classifier, self._made = head, (head,)
        self._fresh = self._classifier_state()[0], ""  # of this form, with the network's weights

    def make_classifier(self, feature_dim: int) -> nn.Module:
        """Return a layer (B, feature_dim, L) -> (B, num_classes, L)."""
        return TokenHead(feature_dim, self.num_classes, bias=self._bias)

    def network(self) -> nn.Module:
        """Return a copy of the network with its last layer; see :meth:`fedcore.SplitModel.network`."""
        network = super().network()
        head = network.get_submodule(self._last)
        tied = isinstance(head, TiedHead)
        own = {"weight": head._embedding[0].weight} if isinstance(head, TiedHead) else dict(head.named_parameters())
        layer = nn.Linear(self.feature_dim, self.num_classes, bias=not tied and self._bias, device="meta")
        for name, parameter in own.items():
            setattr(layer, name, parameter)
        network.set_submodule(self._last, layer)
        return network


def causal_model(network: Any, name: str) -> SplitModel:
    """Split a causal language model of transformers.

    :raises ConfigError: it is not causal, or does not end with a linear layer that gives the logits.
    """
    layer, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    last = next((path for path, module in network.named_modules() if module is layer), "")
    if not last or not isinstance(layer, nn.Linear):
        raise ConfigError(f"model {name!r} does not end with a linear layer that gives the logits of tokens")
    tokens = torch.stack([torch.arange(4), torch.tensor([0, 1, 2, 0])]) % layer.out_features
    with tried(network):
        logits = network(input_ids=tokens, use_cache=False).logits
    if not torch.allclose(logits[0, :-1], logits[1, :-1], rtol=1e-4, atol=1e-6):
        raise ConfigError(
            f"model {name!r} is not causal: its logits depend on later tokens, which they are to predict. "
            "The task next-token needs a model such as gpt2 or llama"
        )
    tied = isinstance(embedding, nn.Embedding) and embedding.weight is layer.weight and layer.bias is None
    base = CausalFeatures(network)
    base.set_submodule(f"network.{last}", nn.Identity())
    embeddings = cast("nn.Embedding", embedding) if tied else None
    model = CausalModel(base, layer, last=f"network.{last}", embedding=embeddings)
    with tried(model):
        same = torch.allclose(model(tokens).logits.transpose(1, 2), logits, rtol=1e-4, atol=1e-6)
    if not same:
        raise ConfigError(f"model {name!r} changes logits behind its last linear layer; such a network cannot be split")
    return model


def tiny_gpt2(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    """GPT-2 with 2 layers of width 64 and 4 heads, without dropout, for blocks (vocabulary, L)."""
    load_torchvision()  # transformers imports it, and it may need help
    from transformers import GPT2Config, GPT2LMHeadModel

    vocabulary, length = input_shape
    sizes: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": length, "vocab_size": vocabulary}
    others: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**sizes, **others, bos_token_id=0, eos_token_id=0)
    return causal_model(GPT2LMHeadModel(config), "tiny-gpt2")


tiny_gpt2.takes = ("tokens",)  # type: ignore[attr-defined]
