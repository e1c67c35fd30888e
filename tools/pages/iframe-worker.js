// Worker for pages opened from files, where browsers refuse real ones: a hidden frame runs the script.
// Material for MkDocs asks for this name in its search; its plugin `offline` would fetch a copy from the web.
class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.appendChild(this.frame);
    const inside = this.frame.contentWindow;
    window.addEventListener("message", (event) => {
      if (event.source === inside) this.dispatchEvent(new MessageEvent("message", { data: event.data }));
    });
    inside.document.open();
    inside.document.write(
      `<body><script>self.postMessage = (data) => parent.postMessage(data, "*");</script>
      <script src="${url}"></script>`,
    );
    inside.document.close();
    this.ready = new Promise((resolve) => inside.addEventListener("load", resolve)); // open() drops earlier listeners
  }

  async postMessage(data) {
    await this.ready;
    this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
  }

  terminate() {
    this.frame.remove();
  }
}

window.IFrameWorker = IFrameWorker;
if (location.protocol === "file:") window.Worker = IFrameWorker;
