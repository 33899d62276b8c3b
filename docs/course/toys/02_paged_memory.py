# --8<-- [start:toy-pages]
import torch


class PagedKV:
    """K and V of one layer. A slot is page * page_size + offset."""

    def __init__(self, num_pages, page_size, num_heads, head_dim):
        self.page_size = page_size
        self.free_pages = list(range(1, num_pages + 1))  # page 0 is the dummy page
        self.k = torch.zeros((num_pages + 1) * page_size, num_heads, head_dim)
        self.v = torch.zeros_like(self.k)

    def grow(self, slots, num_tokens):
        """Append slots for more tokens: the rest of the last page, then new pages."""
        num_pages = -(-(len(slots) + num_tokens) // self.page_size) - -(-len(slots) // self.page_size)
        if num_pages > len(self.free_pages):
            return False  # nothing was taken
        for _ in range(num_tokens):
            if len(slots) % self.page_size == 0:
                slots.append(self.free_pages.pop(0) * self.page_size)
            else:
                slots.append(slots[-1] + 1)
        return True
        # --8<-- [end:toy-pages]

    # --8<-- [start:toy-attend]
    def release(self, slots):
        self.free_pages += dict.fromkeys(slot // self.page_size for slot in slots)
        slots.clear()

    def attend(self, q, slots):
        """q [num_heads, head_dim] of the newest token -> [num_heads, head_dim]"""
        k, v = self.k[slots], self.v[slots]  # gather: [num_tokens, num_heads, head_dim]
        scores = torch.einsum("hd,thd->ht", q, k) / q.shape[-1] ** 0.5
        return torch.einsum("ht,thd->hd", scores.softmax(-1), v)
        # --8<-- [end:toy-attend]
