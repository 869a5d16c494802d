// Numbers as people type them; what is none is refused in words before anything is sent.

const positive = (number) => Number.isFinite(number) && number > 0;
const whole = (low, high = Infinity) => (number, text) => /^\d+$/.test(text) && number >= low && number <= high;
const KINDS = {
  seconds: [positive, "a number of seconds, such as 5"],
  at: [positive, "a number of seconds, such as 5"],
  seed: [whole(0), "a whole number from 0"],
  takes: [whole(1, 16), "a whole number, 1 to 16"],
  num_inference_steps: [whole(1), "a whole number from 1"],
  guidance_scale: [Number.isFinite, "a number, such as 5"],
};
const LABELS = { at: "The time of a later prompt", num_inference_steps: "Steps", guidance_scale: "Guidance" };

export class Slip extends Error {
  constructor(name, words, param) {
    super(`${LABELS[name] ?? name[0].toUpperCase() + name.slice(1)}: ${words}`);
    this.param = param;
  }
}

// The number of a field, or its text where it is larger than a number here; throws a Slip.
export function numberOf(name, given, param = name) {
  const text = given.trim();
  const number = text ? Number(text.replace(",", ".")) : NaN;
  const [legal, words] = KINDS[name];
  if (!legal(number, text)) throw new Slip(name, words, param);
  return Number.isInteger(number) && !Number.isSafeInteger(number) ? text : number;
}
