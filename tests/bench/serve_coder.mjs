// An OpenAI-compatible chat endpoint on node-llama-cpp, for tests/bench/real_agent.py:
//     node serve_coder.mjs FOLDER MODEL PORT CONTEXT
// FOLDER holds node_modules. There are two contexts of one thread and two sequences each: threads of
// one context would wait for each other on cores that others use. A sequence keeps the tokens of its
// last request, and a request takes a free one that shares its longest beginning. Unless a request
// says otherwise, replies are sampled with the top-p and top-k that the publisher of the model gives;
// without the penalty that node-llama-cpp has for repeated tokens, since programs repeat their names.
import http from "node:http";
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";

const [folder, modelPath, port, contextSize] = process.argv.slice(2);
const {getLlama, LlamaCompletion} = await import(
    pathToFileURL(createRequire(`${folder}/`).resolve("node-llama-cpp")));
const CONTEXTS = 2, SLOTS = 2, SHARED = 600;  // tokens that a busy context is worth
const llama = await getLlama({build: "never", gpu: false, logLevel: "error"});
const model = await llama.loadModel({modelPath});
const slots = [];
for (let c = 0; c < CONTEXTS; c++) {
    const context = await model.createContext(
        {contextSize: Number(contextSize), threads: 1, sequences: SLOTS});
    for (let s = 0; s < SLOTS; s++)
        slots.push({sequence: context.getSequence(), context: c, busy: false, held: []});
}
const waiting = [];

function render(messages) {  // ChatML of Qwen 2.5
    const said = messages.map(m => `<|im_start|>${m.role}\n${m.content}<|im_end|>\n`).join("");
    const system = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. "
        + "You are a helpful assistant.<|im_end|>\n";
    return (messages[0].role === "system" ? "" : system) + said + "<|im_start|>assistant\n";
}

function shared(a, b) {
    let n = 0;
    while (n < a.length && n < b.length && a[n] === b[n]) n++;
    return n;
}

async function take(tokens) {
    for (;;) {
        const worth = slot => shared(slot.held, tokens)
            - SHARED * slots.filter(s => s.busy && s.context === slot.context).length;
        const free = slots.filter(slot => !slot.busy).sort((a, b) => worth(b) - worth(a));
        if (free.length) {
            free[0].busy = true;
            return free[0];
        }
        await new Promise(resolve => waiting.push(resolve));
    }
}

async function answer(asked) {
    const tokens = model.tokenize(render(asked.messages), true);
    const limit = asked.max_completion_tokens ?? asked.max_tokens ?? 512;
    if (tokens.length + limit > Number(contextSize))
        return [400, {error: {message: `maximum context length is ${contextSize} tokens`}}];
    const slot = await take(tokens);
    try {
        const completion = new LlamaCompletion({contextSequence: slot.sequence});
        const made = await completion.generateCompletionWithMeta(tokens, {
            maxTokens: limit, temperature: asked.temperature ?? 1, topP: asked.top_p ?? 0.8,
            topK: asked.top_k ?? 20, repeatPenalty: false, seed: asked.seed,
            customStopTriggers: ["<|im_end|>"]});
        completion.dispose({disposeSequence: false});
        const reply = model.tokenize(made.response);
        slot.held = [...tokens, ...reply];
        const reason = made.metadata.stopReason === "maxTokens" ? "length" : "stop";
        return [200, {
            choices: [{finish_reason: reason, message: {role: "assistant", content: made.response}}],
            usage: {prompt_tokens: tokens.length, completion_tokens: reply.length}}];
    } finally {
        slot.busy = false;
        waiting.shift()?.();
    }
}

http.createServer(async (request, response) => {
    let body = "";
    for await (const chunk of request) body += chunk;
    const models = [200, {object: "list", data: [{id: "coder", object: "model"}]}];
    const [status, content] = request.method === "GET" ? models : await answer(JSON.parse(body))
        .catch(error => [500, {error: {message: String(error)}}]);
    response.writeHead(status, {"content-type": "application/json"});
    response.end(JSON.stringify(content));
}).listen(Number(port), "127.0.0.1", () => console.log("ready"));
