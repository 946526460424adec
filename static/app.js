// Plain ES modules, no build step. Each module finds its elements by data attributes and works alone.
import "./js/menus.js";
import "./js/times.js";
import "./js/polling.js";
import "./js/actions.js";
import "./js/log.js";
import "./js/editor.js";
import "./js/selection.js";
import "./js/reorder.js";
import "./js/move-menu.js";
import "./js/priorities.js";
import "./js/announcements.js";
import "./js/costs.js";
