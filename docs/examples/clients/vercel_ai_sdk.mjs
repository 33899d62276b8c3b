// Vercel AI SDK: text and stream of the three providers: openai-compatible, openai (responses), anthropic; an object.
// npm install ai @ai-sdk/openai-compatible @ai-sdk/openai @ai-sdk/anthropic zod
import { generateText, streamText, generateObject } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createOpenAI } from "@ai-sdk/openai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { z } from "zod";
const baseURL = process.env.URL + "/v1", apiKey = "none";
const settings = { name: "d", baseURL, apiKey, supportsStructuredOutputs: true };
const compatible = createOpenAICompatible(settings)("tiny-dense");
const models = [compatible, createOpenAI({ baseURL, apiKey })("tiny-dense"),
                createAnthropic({ baseURL, apiKey })("tiny-dense")];
for (const model of models) {
  const ask = { model, prompt: "What is 12 + 30?", temperature: 0, maxRetries: 0, maxOutputTokens: 64 };
  const { text } = await generateText(ask);
  if (text !== "12 + 30 = 42") throw new Error(text);
  let streamed = "";
  for await (const piece of streamText(ask).textStream) streamed += piece;
  if (streamed !== text) throw new Error(streamed);
}
const schema = z.object({ city: z.enum(["Bergen", "Lima"]) });
const where = { model: compatible, schema, prompt: "Where?", temperature: 0, maxRetries: 0 };
const { object } = await generateObject(where);
if (!object.city) throw new Error("no city");
