// A client of the public proto in Node: `node client.js ADDRESS SCENARIO` prints one JSON object.
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const proto = join(dirname(fileURLToPath(import.meta.url)), "../../../proto");
const definition = loader.loadSync("octavo/v1/generation.proto", {
  includeDirs: [proto, join(proto, "third_party")],
  longs: Number,
  enums: String,
  oneofs: true,
});
const { GenerationService } = grpc.loadPackageDefinition(definition).octavo.v1;

const [address, scenario] = process.argv.slice(2);
const client = new GenerationService(address, grpc.credentials.createInsecure());
const start = (requestId, fields) => ({ requestId, text: "hello", stop: { maxTokens: 4 }, ...fields });
const statusOf = (error) => ({ code: error.code, message: error.details, trailers: Object.keys(error.metadata.getMap()) });

/** All events of a streaming call, and its status. */
function collect(call) {
  const events = [];
  return new Promise((resolve) => {
    call.on("data", (message) => events.push(...message.events));
    call.on("error", (error) => resolve({ events, status: statusOf(error) }));
    call.on("end", () => resolve({ events, status: { code: 0 } }));
  });
}

const scenarios = {
  unary: () =>
    new Promise((resolve) =>
      client.GenerateUnary({ start: start("a") }, (error, response) =>
        resolve(error ? { status: statusOf(error) } : { response }),
      ),
    ),
  refused: () =>
    new Promise((resolve) =>
      client.GenerateUnary({ start: start("a", { sampling: { temperature: -1 } }) }, (error, response) =>
        resolve(error ? { status: statusOf(error) } : { response }),
      ),
    ),
  stream: () => collect(client.GenerateStream({ start: start("a") })),
  bidi: async () => {
    const call = client.Generate();
    const result = collect(call);
    call.write({ start: start("a") });
    call.write({ start: start("b", { text: "slow", stop: {} }) });
    let cancelled = false;
    call.on("data", (message) => {
      if (!cancelled && message.events.some((event) => event.requestId === "b" && event.event === "delta")) {
        cancelled = true;
        call.write({ cancel: { requestId: "b" } });
        call.end();
      }
    });
    return result;
  },
};

console.log(JSON.stringify(await scenarios[scenario]()));
client.close();
