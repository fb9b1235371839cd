// Browsers start no worker for a page from file://, and the search runs in one. There, a hidden frame takes its place:
// it loads the same script, and messages go to it and come from it as they would with a worker.
if (location.protocol === "file:") {
  // The search script asks for this name to find out that it runs in a frame.
  window.IFrameWorker = window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #ready;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      this.#ready = new Promise((resolve) => {
        this.#frame.addEventListener("load", () => {
          const inner = this.#frame.contentWindow;
          inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = inner.document.createElement("script");
          script.src = new URL(url, location.href).href;
          script.addEventListener("load", () => resolve(inner));
          inner.document.head.append(script);
        }, { once: true });
      });
      document.body.append(this.#frame);
    }

    async postMessage(data) {
      const inner = await this.#ready;
      inner.dispatchEvent(new inner.MessageEvent("message", { data }));
    }

    terminate() {
      this.#frame.remove();
    }
  };
}
