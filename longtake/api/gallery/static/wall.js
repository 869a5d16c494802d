// The wall of cards: any number of videos, few elements. Rows far from the window are taken out and
// their room is kept as padding; coming back they are asked for by id, as they are then.

import * as live from "./live.js";
import { cardOf, update } from "./cards.js";
import { picked } from "./select.js";
import { $, $$, localTimes, part } from "./util.js";

const OVER = 4; // rows kept above and below the window
const SLACK = 3; // rows beyond that before any are taken out
const ASK = 120; // cards of one request
const EARLY_PX = 1200; // how long before its end the list is continued

export class Wall {
  constructor(section) {
    this.section = section;
    this.grid = $(".grid", section);
    this.empty = $(".empty", section);
    this.query = section.dataset.query;
    this.pill = null;
    this.known = new Set();
    this.order = []; // ids, newest first, as far as they were loaded
    this.first = 0; // the cards in the page are order[first..last)
    this.last = 0;
    this.filling = false;
    this.loading = false;
    this.later = []; // what came while rows were being put back
    this.arrived = []; // new ones that came while the reader is further down
    this.take($$(":scope > .card", this.grid));
    this.more = $(".more", section);
    if (this.more) this.grid.after(this.more);
    this.onScroll = () => {
      if (this.frame) return;
      this.frame = requestAnimationFrame(() => {
        this.frame = 0;
        this.look();
      });
    };
    addEventListener("scroll", this.onScroll, { passive: true });
    this.sizes = new ResizeObserver(this.onScroll);
    this.sizes.observe(this.grid);
    this.look();
  }

  close() {
    removeEventListener("scroll", this.onScroll);
    this.sizes.disconnect();
    live.dropIn(this.section);
    this.pill?.remove();
  }

  take(cards) {
    for (const card of cards) {
      if (this.known.has(card.dataset.id)) {
        card.remove();
        continue;
      }
      this.known.add(card.dataset.id);
      this.order.push(card.dataset.id);
      this.grid.append(card);
      this.dress(card);
      this.last += 1;
    }
  }

  dress(card) {
    const box = $("[data-do=select]", card);
    if (box) box.checked = picked.has(card.dataset.id);
    card.toggleAttribute("data-picked", picked.has(card.dataset.id));
    localTimes(card);
    live.follow(card);
  }

  // Columns, and the height of a row with its gap.
  measure() {
    const style = getComputedStyle(this.grid);
    const columns = style.gridTemplateColumns.split(" ").length;
    const card = $(":scope > .card", this.grid);
    const gap = parseFloat(style.rowGap) || 0;
    return { columns, row: card ? card.offsetHeight + gap : 0 };
  }

  async look() {
    if (!this.section.isConnected) return;
    const { columns, row } = this.measure();
    if (row) this.trim(columns, row);
    if (row && !this.filling) await this.fill(columns, row);
    const room = this.section.getBoundingClientRect().bottom - innerHeight;
    if (this.more && !this.loading && room < EARLY_PX && this.last === this.order.length) {
      await this.load();
    }
    const atTop = this.first === 0 && scrollY < 400 && !this.filling;
    if (this.arrived.length && atTop) this.welcome();
  }

  wanted(columns, row) {
    const top = -this.grid.getBoundingClientRect().top;
    const rows = Math.ceil(innerHeight / row) + 1;
    const at = Math.max(0, Math.floor(top / row));
    const from = Math.max(0, at - OVER) * columns;
    const to = Math.min(this.order.length, (at + rows + OVER) * columns);
    return { from: Math.min(from, Math.max(0, this.order.length - columns)), to };
  }

  trim(columns, row) {
    const { from, to } = this.wanted(columns, row);
    const slack = SLACK * columns;
    const cards = $$(":scope > .card", this.grid);
    let first = this.first;
    if (from - this.first > slack || this.first % columns) {
      first = Math.max(from, Math.ceil(this.first / columns) * columns);
      first = Math.min(first - (first % columns), this.last);
      if (first < this.first) first = this.first;
    }
    const last = this.last - to > slack ? Math.max(to, first) : this.last;
    cards.forEach((card, k) => {
      const at = this.first + k;
      if (at < first || at >= last) {
        live.drop(card.dataset.id);
        card.remove();
      }
    });
    this.first = first;
    this.last = Math.max(last, first);
    this.pad(columns, row);
  }

  pad(columns, row) {
    const above = Math.floor(this.first / columns) * row;
    const below = Math.ceil(Math.max(0, this.order.length - this.last) / columns) * row;
    this.grid.style.paddingTop = `${above}px`;
    this.grid.style.paddingBottom = `${below}px`;
  }

  // Put back what the window has come to.
  async fill(columns, row) {
    const { from, to } = this.wanted(columns, row);
    const outside = from >= this.last || to <= this.first;
    if (!outside && from >= this.first && to <= this.last) return;
    this.filling = true;
    try {
      if (outside) {
        $$(":scope > .card", this.grid).forEach((card) => {
          live.drop(card.dataset.id);
          card.remove();
        });
        this.first = this.last = from - (from % columns);
      }
      const above = this.order.slice(Math.min(from, this.first), this.first);
      const below = this.order.slice(this.last, to);
      if (above.length) await this.ask(above, true);
      if (below.length) await this.ask(below, false);
      this.pad(columns, row);
    } catch {
      // the next scroll asks again
    } finally {
      this.filling = false;
      for (const [id, card] of this.later.splice(0)) this.put(id, card);
    }
    requestAnimationFrame(this.onScroll);
  }

  async ask(ids, above) {
    for (let k = 0; k < ids.length; k += ASK) {
      const some = above ? ids.slice(Math.max(0, ids.length - k - ASK), ids.length - k) : ids.slice(k, k + ASK);
      const fresh = await part(`/gallery/cards?${this.query}&ids=${some.join(",")}`);
      const cards = new Map($$("article.card", fresh).map((card) => [card.dataset.id, card]));
      const there = some.filter((id) => cards.has(id));
      const gone = new Set(some.filter((id) => !cards.has(id)));
      const first = $(":scope > .card", this.grid);
      for (const id of there) {
        if (above) this.grid.insertBefore(cards.get(id), first);
        else this.grid.append(cards.get(id));
        this.dress(cards.get(id));
      }
      if (gone.size) this.order = this.order.filter((id) => !gone.has(id));
      gone.forEach((id) => this.known.delete(id));
      if (above) this.first -= there.length + gone.size;
      else this.last += there.length;
      if (above) this.last -= gone.size;
    }
  }

  async load() {
    this.loading = true;
    const link = this.more;
    try {
      const fresh = await part(link.getAttribute("data-part"));
      const cards = $$("article.card", fresh);
      link.remove();
      this.more = $(".more", fresh);
      this.take(cards);
      if (this.more) this.grid.after(this.more);
    } catch {
      // the link stays, to be tried or clicked again
    } finally {
      this.loading = false;
    }
    requestAnimationFrame(this.onScroll);
  }

  // A card as it is now, or null where the job is not among those shown any more.
  put(id, fresh) {
    if (this.filling) {
      this.later.push([id, fresh]);
      return;
    }
    const card = cardOf(id);
    if (card && fresh) {
      update(card, fresh);
    } else if (this.known.has(id)) {
      if (!fresh) this.forget(id);
    } else if (fresh) {
      this.enter(id, fresh);
    }
    this.empty.hidden = this.order.length > 0 || this.arrived.length > 0;
  }

  enter(id, fresh) {
    const newest = $(":scope > .card", this.grid);
    const made = Number(fresh.dataset.created);
    const isNewest = !newest || this.first > 0 || made >= Number(newest.dataset.created);
    if (this.first > 0 || (isNewest && scrollY > 400)) {
      if (!this.arrived.includes(id)) this.arrived.push(id);
      this.announce();
      return;
    }
    const cards = $$(":scope > .card", this.grid);
    const before = cards.findIndex((card) => Number(card.dataset.created) <= made);
    // what belongs behind the last loaded one comes with its page
    if (before < 0 && (this.more || this.last < this.order.length)) return;
    const at = before < 0 ? cards.length : before;
    this.known.add(id);
    this.order.splice(this.first + at, 0, id);
    this.last += 1;
    this.grid.insertBefore(fresh, cards[at] ?? null);
    fresh.classList.add("fresh");
    this.dress(fresh);
    this.onScroll();
  }

  forget(id) {
    const at = this.order.indexOf(id);
    this.known.delete(id);
    if (at < 0) return;
    this.order.splice(at, 1);
    const card = cardOf(id);
    if (card) {
      const next = card.nextElementSibling ?? card.previousElementSibling;
      const focused = card.contains(document.activeElement);
      live.drop(id);
      card.remove();
      if (focused) $("h3 a", next ?? this.grid)?.focus({ preventScroll: true });
      this.last -= 1;
    } else if (at < this.first) {
      this.first -= 1;
      this.last -= 1;
    }
    this.onScroll();
  }

  announce() {
    if (!this.pill) {
      this.pill = document.createElement("button");
      this.pill.type = "button";
      this.pill.className = "pill";
      this.pill.addEventListener("click", () => scrollTo({ top: 0 }));
      this.section.before(this.pill);
    }
    const count = this.arrived.length;
    this.pill.textContent = count === 1 ? "1 new video" : `${count} new videos`;
  }

  async welcome() {
    const ids = this.arrived.splice(0);
    this.pill?.remove();
    this.pill = null;
    const fresh = await part(`/gallery/cards?${this.query}&ids=${ids.join(",")}`).catch(() => null);
    for (const card of fresh ? $$("article.card", fresh) : []) this.put(card.dataset.id, card);
  }
}
