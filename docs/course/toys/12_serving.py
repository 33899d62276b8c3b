# --8<-- [start:toy-detokenizer]
class ToyDetokenizer:
    """The text of one request in pieces. Decodes everything in each step."""

    def __init__(self, decode, stops=()):
        self.decode, self.stops, self.ids, self.num_given = decode, stops, [], 0

    def append(self, new_ids, is_end=False):
        self.ids += new_ids
        text = self.decode(self.ids)
        for stop in self.stops:
            text = text.partition(stop)[0]
        if not is_end:
            text = text.rstrip("\ufffd")  # bytes of a character that is not complete
            text = text[: len(text) - self.num_held(text)]
        piece = text[self.num_given :]
        self.num_given += len(piece)
        return piece
        # --8<-- [end:toy-detokenizer]

    # --8<-- [start:toy-held]
    def num_held(self, text):
        """Length of the longest end of the text with which a stop string may begin."""
        ends = [n for stop in self.stops for n in range(len(stop)) if text.endswith(stop[:n])]
        return max(ends, default=0)
        # --8<-- [end:toy-held]


# --8<-- [start:toy-loop]
def engine_loop(inbox, outbox, next_token, end_token):
    """Messages in, one step of every live request, messages out."""
    live = {}
    while True:
        while not live or not inbox.empty():
            kind, rid, ids = inbox.get()
            if kind == "stop":
                return
            live.pop(rid, None)  # an abort may come behind the end
            if kind == "generate":
                live[rid] = ids
        for rid, ids in list(live.items()):
            ids.append(next_token(ids))
            if ids[-1] == end_token:
                del live[rid]
            outbox.put((rid, ids[-1], rid not in live))
            # --8<-- [end:toy-loop]
