// Times llama.cpp on a GGUF file, or prints the tokens that it generates greedily; `lockstep bench generate` is its counterpart.
//
//     npm install node-llama-cpp@3.22.1 @node-llama-cpp/linux-x64@3.22.1 --ignore-scripts     (in any directory)
//     node llama_cpp.mjs --modules DIRECTORY/node_modules --model FILE.gguf [--threads 2] [--prompt-tokens 512] [--new-tokens 32]
//     node llama_cpp.mjs --modules ... --model FILE.gguf --ids 1,2,3 --new-tokens 20
//
// Prompts are ids without meaning; speed does not depend on them. The best of `--runs` runs is printed, after one to warm up.

import path from "node:path";
import { pathToFileURL } from "node:url";
import { parseArgs } from "node:util";

const { values: options } = parseArgs({
    options: {
        modules: { type: "string" },
        model: { type: "string" },
        threads: { type: "string", default: "2" },
        "prompt-tokens": { type: "string", default: "512" },
        "new-tokens": { type: "string", default: "32" },
        runs: { type: "string", default: "5" },
        ids: { type: "string" },
    },
});
const entry = path.resolve(options.modules, "node-llama-cpp/dist/index.js");
const { getLlama, LlamaLogLevel } = await import(pathToFileURL(entry));

const threads = Number(options.threads);
const newTokens = Number(options["new-tokens"]);
const llama = await getLlama({ gpu: false, build: "never", logLevel: LlamaLogLevel.warn, maxThreads: threads });
const model = await llama.loadModel({ modelPath: options.model, gpuLayers: 0 });
const ids = options.ids?.split(",").map(Number);
const prompt = ids ?? Array.from({ length: Number(options["prompt-tokens"]) }, (_, at) => (at * 7919) % 250);
const context = await model.createContext({
    contextSize: prompt.length + newTokens + 8,
    batchSize: 512,
    threads: { ideal: threads, min: threads },
    flashAttention: false,
});
const sequence = context.getSequence();

async function run() {
    await sequence.clearHistory();
    const start = performance.now();
    const times = [];
    const tokens = [];
    for await (const token of sequence.evaluate(prompt, { temperature: 0 })) {
        times.push(performance.now());
        tokens.push(Number(token));
        if (tokens.length > newTokens) {
            break;
        }
    }
    const seconds = (times.at(-1) - times[0]) / 1000;
    return { tokens, promptPerSecond: prompt.length / ((times[0] - start) / 1000), newPerSecond: (times.length - 1) / seconds };
}

if (ids) {
    console.log((await run()).tokens.slice(0, newTokens).join(","));
} else {
    await run();
    const runs = [];
    for (let count = 0; count < Number(options.runs); count++) {
        runs.push(await run());
    }
    const best = (name) => Math.max(...runs.map((run) => run[name]));
    console.log(JSON.stringify({
        model: path.basename(options.model), threads, prompt_tokens: prompt.length, new_tokens: newTokens,
        prompt_tokens_per_s: best("promptPerSecond"), new_tokens_per_s: best("newPerSecond"),
    }));
}
process.exit(0);
