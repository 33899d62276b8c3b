# mypy: ignore-errors
# ruff: noqa: F821
class MyCollectives:
    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        self.log.add("broadcast", self.name, x)
        if self.rank != source:
            return self.receive(x, source)
        for other in range(self.size):
            if other != source:
                self.send(x, other)
        return x.clone()

    def _gather(self, op: str, x: torch.Tensor) -> list[torch.Tensor]:
        self.log.add(op, self.name, x)
        parts = []
        for turn in range(self.size):
            if turn == self.rank:
                for other in range(self.size):
                    if other != self.rank:
                        self.send(x, other)
                parts.append(x)
            else:
                parts.append(self.receive(x, turn))
        return parts

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._gather("all_gather", x))

    def _sum(self, parts: list[torch.Tensor]) -> torch.Tensor:
        dtype = parts[0].dtype
        total = parts[0].to(torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype)
        for part in parts[1:]:
            total = total + part
        return total.to(dtype)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._sum(self._gather("all_reduce", x))

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return self._sum([part.chunk(self.size)[self.rank] for part in self._gather("reduce_scatter", x)])

    def all_to_all(
        self, x: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        self.log.add("all_to_all", self.name, x, any_rows=True)
        rows = list(x.split(list(send_counts)))
        received = []
        for turn in range(self.size):
            if turn == self.rank:
                for other in range(self.size):
                    if other != self.rank and send_counts[other]:
                        self.send(rows[other], other)
                received.append(rows[turn])
            else:
                like = x.new_empty(receive_counts[turn], *x.shape[1:])
                received.append(self.receive(like, turn) if receive_counts[turn] else like)
        return torch.cat(received)
