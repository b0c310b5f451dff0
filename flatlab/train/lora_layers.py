"""The trainer's LoRA layers on a CPU: peft's modules and weights, with fewer passes over memory.

    y = x W^T + s (x A^T) B^T

W: (out, in), frozen. A: (r, in), B: (out, r). s = alpha / r (Hu et al., LoRA, arXiv:2106.09685,
equation 3). peft computes the product, its multiple and the sum one after the other, and so does
its backward pass; here both are one matrix product that adds to its output.
"""

import functools

import torch
import torch.nn.functional as F


class LoraProduct(torch.autograd.Function):
    """With g = dL/dy and g' = s g B: dL/dA = g'^T x, dL/dB = s g^T (x A^T), dL/dx = g W + g' A."""

    @staticmethod
    def forward(ctx, x, weight, bias, a, b, scaling):
        """x: (..., in). Returns (..., out)."""
        rows = x.flatten(0, -2)
        down = rows @ a.T
        y = F.linear(rows, weight, bias)
        y.addmm_(down, b.T, alpha=scaling)
        ctx.save_for_backward(rows, weight, a, b, down)
        ctx.scaling = scaling
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, grad):
        rows, weight, a, b, down = ctx.saved_tensors
        g = grad.flatten(0, -2)
        g_down = g @ (ctx.scaling * b)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (g @ weight).addmm_(g_down, a).unflatten(0, grad.shape[:-1])
        return grad_x, None, None, g_down.T @ rows, ctx.scaling * (g.T @ down), None


def forward(layer, x):
    """Of a peft layer: what its own forward computes, for one adapter without dropout."""
    base = layer.base_layer
    if layer.disable_adapters:
        return base(x)
    a = layer.lora_A["default"].weight
    b = layer.lora_B["default"].weight
    return LoraProduct.apply(x, base.weight, base.bias, a, b, layer.scaling["default"])


def use_in(layers: list) -> None:
    """Makes these peft layers compute with LoraProduct. fp32 only."""
    for layer in layers:
        layer.forward = functools.partial(forward, layer)
