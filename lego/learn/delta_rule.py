"""The gated delta rule in torch's own operators, a chunk of tokens at a time."""

import torch
import torch.nn.functional as F

CHUNK = 64


def gated_delta_rule(
    q_BLNK: torch.Tensor,
    k_BLNK: torch.Tensor,
    v_BLNV: torch.Tensor,
    g_BLN: torch.Tensor,
    beta_BLN: torch.Tensor,
) -> torch.Tensor:
    """What each head reads [B, L, N, V] from a memory that decays by e^g and is corrected towards v at k.

    With unit q and k, S_t = e^g_t S_(t-1) + k_t u_t' where u_t = beta_t (v_t - e^g_t S_(t-1)' k_t), and token t
    reads S_t' q_t / sqrt(K). Inside a chunk the u solve a triangular system (Yang et al., arXiv 2412.06464);
    from chunk to chunk S is carried. Computed in float32.
    """
    length, chunk = q_BLNK.shape[1], min(CHUNK, q_BLNK.shape[1])
    repeat = v_BLNV.shape[2] // q_BLNK.shape[2]
    q, k = (_unit(x.float()).repeat_interleave(repeat, dim=2) for x in (q_BLNK, k_BLNK))
    q, k, v, g, beta = (
        _chunks(x, chunk) for x in (q * q.shape[-1] ** -0.5, k, v_BLNV.float(), g_BLN[..., None], beta_BLN[..., None])
    )
    decay = g.cumsum(-2)
    since = decay - decay.transpose(-1, -2)  # of the memory of token j at token i
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    since = since.masked_fill(~causal, -torch.inf).exp()
    system = beta * (k @ k.transpose(-1, -2)) * since
    knowns = torch.cat([beta * v, beta * decay.exp() * k], dim=-1)
    solved = torch.linalg.solve_triangular(system, knowns, upper=False, unitriangular=True)
    fresh, stale = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    inside, reads = (q @ k.transpose(-1, -2)) * since, q * decay.exp()
    last = decay[..., -1:, :]
    writes = k * (last - decay).exp()

    state = v.new_zeros(*k.shape[1:3], k.shape[-1], v.shape[-1])
    outs = []
    for c in range(len(q)):
        u = fresh[c] - stale[c] @ state
        outs.append(reads[c] @ state + inside[c] @ u)
        state = last[c].exp() * state + writes[c].transpose(-1, -2) @ u
    out_BNLV = torch.stack(outs, dim=2).flatten(2, 3)[:, :, :length]
    return out_BNLV.transpose(1, 2).type_as(v_BLNV)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _chunks(x_BLNX: torch.Tensor, chunk: int) -> torch.Tensor:
    """[chunks, B, N, tokens, X] in float32; zeros fill the last chunk, which neither decay nor write."""
    padded = F.pad(x_BLNX.float(), (0, 0, 0, 0, 0, -x_BLNX.shape[1] % chunk))
    return padded.unflatten(1, (-1, chunk)).permute(1, 0, 3, 2, 4)
