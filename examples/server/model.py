"""The models: small transformers that embed a text. The weights are random; the work and the memory are not.

`embed` blocks, so the server calls it in threads. What it allocates for a text comes from the lease.
"""

from typing import Protocol

import numpy as np

import asyncmem

LENGTHS = (256, 512, 1024)
"""Of texts in bytes, each a token. A text is padded to the next of them, so that what it needs is known before."""


class Model(Protocol):
    """What the server needs of a model."""

    def embed(self, text: bytes, lease: asyncmem.Lease) -> list[float]:
        """Return the vector of a text of one of the lengths."""


class NumpyModel:
    """On the host. All that grows with the square of a text lies in the lease, and numpy computes in place."""

    width, heads, depth = 128, 8, 4

    def __init__(self) -> None:
        random = np.random.default_rng(0)

        def weights(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
            return random.standard_normal(shape, dtype=np.float32) / np.float32(shape[-2] ** 0.5)

        width = self.width
        self.tokens = weights(256, width)
        self.layers = [
            (weights(3, width, width), weights(width, width), weights(width, 4 * width), weights(4 * width, width))
            for _ in range(self.depth)
        ]

    def embed(self, text: bytes, lease: asyncmem.Lease) -> list[float]:
        """Return the vector of a text of one of the lengths."""
        n = len(text)
        shapes = [(n, self.width), (n, self.width), (3, n, self.width), (self.heads, n, n), (n, 4 * self.width)]
        with lease.allocate_arrays(shapes) as arrays:
            x, update, qkv, scores, hidden = map(np.asarray, arrays)
            query, key, value = qkv.reshape(3, n, self.heads, -1).swapaxes(1, 2)
            np.take(self.tokens, np.frombuffer(text, np.uint8), axis=0, out=x)
            for project, mix, widen, narrow in self.layers:
                np.matmul(x, project, out=qkv)
                np.matmul(query, key.swapaxes(1, 2), out=scores)
                scores -= scores.max(axis=-1, keepdims=True)
                np.exp(scores, out=scores)
                scores /= scores.sum(axis=-1, keepdims=True)
                np.matmul(scores, value, out=query)  # the query is not needed any more
                np.matmul(qkv[0], mix, out=update)
                x += update
                np.matmul(x, widen, out=hidden)
                np.maximum(hidden, 0, out=hidden)
                np.matmul(hidden, narrow, out=update)
                x += update
                x /= np.sqrt(np.square(x, out=update).mean(axis=-1, keepdims=True))
            vector: list[float] = x.mean(axis=0).tolist()
        return vector


class TorchModel:
    """On a GPU, by torch, which allocates from the lease."""

    width, heads, depth = 2048, 16, 24

    def __init__(self, device: str) -> None:
        import torch

        from asyncmem.interop.torch import use

        self.torch, self.use, self.device = torch, use, device
        layer = torch.nn.TransformerEncoderLayer(self.width, self.heads, 4 * self.width, batch_first=True)
        with torch.device(device):
            self.tokens = torch.nn.Embedding(256, self.width)
            self.layers = torch.nn.TransformerEncoder(layer, self.depth).to(device).eval()

    def embed(self, text: bytes, lease: asyncmem.Lease) -> list[float]:
        """Return the vector of a text of one of the lengths."""
        with self.use(lease), self.torch.inference_mode():
            return self.compute(text)  # in a function of its own, so that no tensor outlives the block

    def compute(self, text: bytes) -> list[float]:
        """Return the vector of a text, which waits for the GPU."""
        tokens = self.torch.tensor(list(text), device=self.device)
        vector: list[float] = self.layers(self.tokens(tokens)[None]).mean(dim=1)[0].tolist()
        return vector


def make_model(device: str) -> Model:
    """Return the model for a device."""
    return NumpyModel() if device == "host" else TorchModel(device)
