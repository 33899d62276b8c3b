// What is wrong with the layout of this page, as a list of sentences: run by tests/docs/test_layout.py.
const found = new Set();
const width = document.documentElement.clientWidth;
const name = (element) => {
  const kind = element.classList.length ? `${element.localName}.${element.classList[0]}` : element.localName;
  return `${kind} "${element.textContent.trim().replace(/\s+/g, " ").slice(0, 40)}"`;
};
const MAY_SCROLL = ".md-tabs, .md-header, .tabbed-labels, .md-footer, .md-typeset__scrollwrap, pre";
const isShown = (element) => element.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });
const channels = (color) => {
  const numbers = color.match(/[\d.]+/g).map(Number);
  return [numbers[0], numbers[1], numbers[2], numbers.length > 3 ? numbers[3] : 1];
};
const over = (front, back) => [0, 1, 2].map((i) => front[i] * front[3] + back[i] * (1 - front[3])).concat(1);
const luminance = (color) => {
  const [red, green, blue] = color.slice(0, 3).map((c) => {
    const part = c / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
};
const background = (element) => {
  if (!element) return [255, 255, 255, 1];
  const own = channels(getComputedStyle(element).backgroundColor);
  return own[3] === 1 ? own : over(own, background(element.parentElement));
};
const contrast = (front, back) => {
  const [dark, light] = [luminance(front), luminance(back)].sort((a, b) => a - b);
  return (light + 0.05) / (dark + 0.05);
};

for (const element of document.querySelectorAll(".md-header *, .md-tabs *, .md-content *, .md-footer *")) {
  if (!isShown(element)) continue;
  const box = element.getBoundingClientRect();
  const style = getComputedStyle(element);
  const inSvg = element.ownerSVGElement;
  if (!inSvg && box.width > 0 && (box.right > width + 1 || box.left < -1) && !element.closest(MAY_SCROLL)) {
    found.add(`beyond the screen: ${name(element)}`);
  }
  if (/auto|scroll|hidden/.test(style.overflowX) && element.scrollWidth > element.clientWidth + 1 && element.clientWidth > 1
      && !element.closest(".md-tabs, .md-header, .tabbed-labels, .md-footer, .language-text, .sample")
      && !(width < 1000 && element.matches(".md-typeset__scrollwrap"))) {
    found.add(`cut off: ${name(element)}`);
  }
  const text = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim());
  if (!text || box.width < 2 || element.closest(".headerlink, .md-clipboard, .md-skip")) continue;
  const scale = inSvg && element.getScreenCTM ? Math.hypot(element.getScreenCTM().a, element.getScreenCTM().b) : 1;
  const size = parseFloat(style.fontSize) * scale;
  if (size < 13.95) found.add(`${size.toFixed(1)} px: ${name(element)}`);
  if (inSvg) continue;
  const back = background(element);
  const ratio = contrast(over(channels(style.color), back), back);
  if (ratio < 4.5) found.add(`contrast ${ratio.toFixed(1)}: ${name(element)}`);
}
if (document.documentElement.scrollWidth > width + 1) found.add(`scrolls sideways: ${document.documentElement.scrollWidth} px`);
let level = 0;
for (const heading of document.querySelectorAll(".md-content :is(h1, h2, h3, h4, h5, h6)")) {
  if (Number(heading.localName[1]) > level + 1) found.add(`skips a level: ${name(heading)}`);
  level = Number(heading.localName[1]);
}
for (const image of document.querySelectorAll(".md-content img:not([alt])")) found.add(`no text: ${image.src}`);
return [...found];
