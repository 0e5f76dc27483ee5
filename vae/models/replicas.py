"""Copies of a network on other devices, which follow the weights of the first."""

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..layers.conv import Conv, stamp_of
from ..layers.conv_weights import marks_of, proved_copy
from .base import Network, unwrapped


@dataclass
class _Replica:
    """A copy of a network, with the state of the parameters that it was copied from."""

    network: Network
    form: list[tuple[object, ...]]
    stamps: list[tuple[object, ...]]  # `stamp_of` each parameter
    marks: list[int]  # `marks_of` all of them


class Replicas:
    """The copies of the networks of a VAE; a copied or pickled VAE starts without any."""

    def __init__(self) -> None:
        self.made = 0  # Number of networks that were copied as a whole
        self._known: dict[tuple[torch.device, str], _Replica] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["Replicas"], tuple[()]]:
        return Replicas, ()

    def on(
        self, device: torch.device, name: str, network: Network, *, proves: bool = False
    ) -> Network:
        """Return the network itself or its copy on a device, made or refreshed if necessary.

        Raises:
            ValueError: The copy is another one, which is looked for if `proves` is set.
        """
        network = unwrapped(network)
        if next(network.parameters()).device == device:
            return network
        sources = _tensors(network)
        with self._lock, torch.inference_mode(False), torch.no_grad():
            known = self._known.get((device, name))
            form, stamps = _form(network), [stamp_of(source) for source in sources]
            marks = torch.stack(marks_of(sources)).view(torch.int64).tolist()
            if known is None or known.form != form:
                self._known.pop((device, name), None)
                del known  # free it before the other one is made
                made = copied(network, device, proved_copy if proves else Tensor.to)
                known = self._known[device, name] = _Replica(made, form, stamps, marks)
                self.made += 1
                return known.network
            everything = known.marks != marks
            pairs = zip(_tensors(known.network), sources, known.stamps, stamps, strict=True)
            for target, source, before, after in pairs:
                if everything or before != after:
                    target.copy_(proved_copy(source, device) if proves else source)
            known.stamps, known.marks = stamps, marks
            return known.network

    def clear(self) -> None:
        """Free all copies."""
        with self._lock:
            self._known.clear()

    def drop(self, device: torch.device) -> None:
        """Free the copies on `device`."""
        with self._lock:
            for key in [key for key in self._known if key[0] == device]:
                del self._known[key]

    def devices(self) -> set[torch.device]:
        """Return the devices that have copies."""
        with self._lock:
            return {device for device, _ in self._known}

    def nbytes(self) -> int:
        """Return the bytes of all copies, with the weights that were derived from them."""
        networks = [replica.network for replica in list(self._known.values())]
        own = sum(tensor.nbytes for network in networks for tensor in _tensors(network))
        parts = (part for network in networks for part in network.modules())
        return own + sum(part.form_bytes() for part in parts if isinstance(part, Conv))


def copied(
    network: Network,
    device: torch.device,
    moved: Callable[[Tensor, torch.device], Tensor] = Tensor.to,
) -> Network:
    """Return a copy on a device, which shares the weights that are there already."""
    there: dict[int, object] = {
        id(parameter): nn.Parameter(moved(parameter.detach(), device), requires_grad=False)
        for parameter in network.parameters()
    }
    there |= {id(buffer): moved(buffer.detach(), device) for buffer in network.buffers()}
    made = copy.deepcopy(network, there)
    # On a GPU this also puts the weights into the layout of their convolutions.
    return made.to(device)


def _tensors(network: nn.Module) -> list[Tensor]:
    return [*network.parameters(), *network.buffers()]


def _form(network: nn.Module) -> list[tuple[object, ...]]:
    """Return what must be equal for a copy to follow `network` by copies of its tensors."""
    modules = [(name, type(module)) for name, module in network.named_modules()]
    named = [*network.named_parameters(), *network.named_buffers()]
    return [*modules, *((name, tensor.shape, tensor.dtype) for name, tensor in named)]
