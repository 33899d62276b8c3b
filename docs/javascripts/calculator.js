// The calculator: the formulas of shared/tools/bench/size.py, with the numbers that the page brings along.
function numSlots(model, card, config) {
  const free = card.memory - config.overhead - model.weights;
  const budget = Math.min(free - card.memory * (1 - config.mem_fraction_static), free - model.reserved);
  return Math.min(Math.floor(Math.max(budget, 0) / model.pool_bytes_per_token), model.max_slots);
}
function stepBound(model, card, batch, context) {
  const share = model.num_experts ? model.experts_per_token / model.num_experts : 0;
  const hit = model.num_experts * (1 - (1 - share) ** batch);
  const seen = model.layers.reduce((sum, [most, count]) => sum + count * (most < 0 ? context : Math.min(context, most)), 0);
  const bytes = model.read_bytes + hit * model.expert_bytes + batch * (seen * model.kv_read_bytes + model.state_bytes);
  const flops = batch * (model.request_flops + seen * model.pair_flops);
  return { bytes, flops, seconds: Math.max(bytes / card.bandwidth, flops / card.matrix_rate) };
}
if (typeof module !== "undefined") module.exports = { numSlots, stepBound };
else
  (function () {
    const form = document.getElementById("calculator");
    if (!form) return;
    const { models, cards, config } = JSON.parse(document.getElementById("calculator-data").textContent);
    const field = (name) => form.querySelector(`[name=${name}]`);
    const fill = (name, values) => values.forEach((value) => field(name).add(new Option(value)));
    fill("model", Object.keys(models));
    field("model").value = "Qwen3-8B";
    fill("card", Object.keys(cards));
    const gib = (bytes) => `${(bytes / 2 ** 30).toFixed(1)} GiB`;
    const number = (value) => Math.round(value).toLocaleString("en");
    function show() {
      const model = models[field("model").value][field("precision").value], card = cards[field("card").value];
      const context = Math.max(1, Number(field("context").value)), wanted = Number(field("batch").value);
      const slots = numSlots(model, card, config), fitting = Math.floor(slots / context);
      const batch = wanted > 0 ? wanted : Math.min(fitting, config.max_running_requests);
      const rows = { "Weights": gib(model.weights), "KV of a token": `${(model.pool_bytes_per_token / 1024).toFixed(1)} KiB` };
      rows["Slots of the KV pool"] = slots ? number(slots) : "none: the weights do not fit";
      rows[`Requests of ${number(context)} tokens`] = number(fitting);
      if (batch > 0) {
        const { seconds } = stepBound(model, card, batch, context);
        rows[`Decode step of ${number(batch)}, at least`] = `${(1e3 * seconds).toFixed(2)} ms`;
        rows["Tokens per second, at most"] = number(batch / seconds);
        if (batch > fitting) rows["Note"] = "this batch does not fit at this context";
      }
      form.querySelector("tbody").innerHTML = Object.entries(rows).map(([name, text]) => `<tr><td>${name}</td><td>${text}</td></tr>`).join("");
    }
    form.addEventListener("input", show);
    show();
  })();
