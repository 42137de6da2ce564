// One task by Vercel's AI SDK: `node client_program.mjs TASK URL MODULES`; prints JSON. As client_program.py.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [task, url, modules] = process.argv.slice(2);
const require = createRequire(pathToFileURL(`${modules}/`));
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { embedMany, generateText, jsonSchema, Output, streamText, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");

const provider = createOpenAICompatible({
  name: "ragjax", baseURL: url, apiKey: "x", supportsStructuredOutputs: true, includeUsage: true,
});
const asked = { model: provider.chatModel("fake"), prompt: "What colour is the lighthouse?" };
const object = (properties) => jsonSchema({ type: "object", properties, required: Object.keys(properties) });

const tasks = {
  chat: async () => (await generateText(asked)).text,
  stream: async () => {
    let said = "";
    for await (const text of streamText(asked).textStream) said += text;
    return said;
  },
  parse: async () => {
    const schema = object({ name: { type: "string" }, people: { type: "integer" } });
    return (await generateText({ ...asked, output: Output.object({ schema }) })).output;
  },
  tools: async () => {
    const weather = tool({ description: "Tells the weather.", inputSchema: object({ city: { type: "string" } }) });
    return (await generateText({ ...asked, tools: { weather } })).toolCalls[0].input;
  },
  embed: async () =>
    (await embedMany({ model: provider.textEmbeddingModel("fake-encoder"), values: ["a", "abc"] })).embeddings,
};
console.log(JSON.stringify(await tasks[task]()));
