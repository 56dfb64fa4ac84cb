//! [`Chart`]: a plot as inline SVG: axes, curves, shaded parts, and marks whose labels never cover one another.
//!
//! Colours and fonts are the page's, by class names. Whatever has a `<title>` shows it under the pointer.

use std::fmt::Write;

/// A plot in the making. Things drawn later lie on top.
#[derive(Debug)]
pub(super) struct Chart {
    x: Axis,
    y: Axis,
    marks: Vec<Mark>,
    body: String,
}

/// One axis: from the least to the largest value, and what stands at it.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    pub(super) from: f64,
    pub(super) to: f64,
    pub(super) ticks: Vec<f64>,
    pub(super) name: String,
}

/// A numbered place on the horizontal axis.
#[derive(Clone, Debug)]
pub(super) struct Mark {
    pub(super) at: f64,
    pub(super) number: usize,
    pub(super) label: String,
    pub(super) title: String,
}

impl Axis {
    /// From 0 to `to` with about `count` round ticks.
    pub(super) fn from_zero(to: f64, count: usize, name: &str) -> Self {
        Self::between(0.0, to, count, name)
    }

    /// Between two values with about `count` round ticks.
    pub(super) fn between(from: f64, to: f64, count: usize, name: &str) -> Self {
        let to = if to > from { to } else { from + 1.0 };
        let step = round_step((to - from) / count.max(1) as f64);
        let first = (from / step).ceil() as i64;
        let ticks = (first..)
            .map(|n| n as f64 * step)
            .take_while(|tick| *tick <= to + step * 1e-6)
            .collect();
        Self { from, to, ticks, name: name.to_owned() }
    }

    fn share(&self, value: f64) -> f64 {
        ((value - self.from) / (self.to - self.from)).clamp(0.0, 1.0)
    }
}

/// The round number, 1, 2 or 5 times a power of ten, that is next above.
fn round_step(step: f64) -> f64 {
    let power = 10_f64.powf(step.log10().floor());
    let factor =
        [1.0, 2.0, 5.0, 10.0].into_iter().find(|f| f * power >= step * 0.999_999).unwrap_or(10.0);
    factor * power
}

impl Chart {
    /// An empty plot.
    pub(super) fn new(x: Axis, y: Axis, marks: Vec<Mark>) -> Self {
        Self { x, y, marks, body: String::new() }
    }

    /// A curve through all points.
    pub(super) fn curve(&mut self, class: &str, points: impl Iterator<Item = (f64, f64)>) {
        let mut path = String::new();
        for (x, y) in points {
            let command = if path.is_empty() { 'M' } else { 'L' };
            let _ = write!(path, "{command}{:.1} {:.1}", self.x_of(x), self.y_of(y));
        }
        let _ = writeln!(self.body, r#"<path class="{class}" d="{path}"/>"#);
    }

    /// Stairs, each step from one point's x to the next one's, the last until `end`; the area below is shaded.
    pub(super) fn stairs(&mut self, class: &str, points: &[(f64, f64)], end: f64) {
        let Some((first, _)) = points.first() else { return };
        let (mut path, mut area) =
            (String::new(), format!("M{:.1} {:.1}", self.x_of(*first), self.y_of(self.y.from)));
        for (index, (x, y)) in points.iter().enumerate() {
            let until = points.get(index + 1).map_or(end, |(next, _)| *next);
            let (left, right, height) = (self.x_of(*x), self.x_of(until), self.y_of(*y));
            let command = if path.is_empty() { 'M' } else { 'L' };
            let _ = write!(path, "{command}{left:.1} {height:.1}L{right:.1} {height:.1}");
            let _ = write!(area, "L{left:.1} {height:.1}L{right:.1} {height:.1}");
        }
        let _ = write!(area, "L{:.1} {:.1}Z", self.x_of(end), self.y_of(self.y.from));
        let _ = writeln!(
            self.body,
            r#"<path class="{class}-area" d="{area}"/><path class="{class}" d="{path}"/>"#
        );
    }

    /// A part of the plot, over its whole height.
    pub(super) fn band(&mut self, class: &str, from: f64, to: f64, title: &str) {
        let (left, right) = (self.x_of(from), self.x_of(to));
        let _ = writeln!(
            self.body,
            r#"<rect class="{class}" x="{left:.1}" y="{:.1}" width="{:.1}" height="{:.1}"><title>{title}</title></rect>"#,
            self.top(),
            (right - left).max(1.5),
            HEIGHT,
        );
    }

    /// The whole picture. `name` says what it shows, to those who can't see it.
    pub(super) fn svg(&self, name: &str) -> String {
        let height = self.top() + HEIGHT + BOTTOM;
        let mut svg =
            format!(r#"<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{name}">"#);
        svg.push('\n');
        self.draw_axes(&mut svg);
        self.draw_mark_lines(&mut svg);
        svg.push_str(&self.body);
        self.draw_marks(&mut svg);
        svg.push_str("</svg>\n");
        svg
    }

    fn draw_axes(&self, svg: &mut String) {
        let (left, right, top, bottom) = (LEFT, WIDTH - RIGHT, self.top(), self.top() + HEIGHT);
        for tick in &self.y.ticks {
            let y = self.y_of(*tick);
            let _ = writeln!(svg, r#"<path class="grid" d="M{left} {y:.1}H{right}"/>"#);
            let _ = writeln!(
                svg,
                r#"<text class="tick" x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"#,
                left - 8.0,
                y + 4.0,
                number(*tick)
            );
        }
        for tick in &self.x.ticks {
            let x = self.x_of(*tick);
            let _ = writeln!(svg, r#"<path class="axis" d="M{x:.1} {bottom:.1}v5"/>"#);
            let _ = writeln!(
                svg,
                r#"<text class="tick" x="{x:.1}" y="{:.1}" text-anchor="middle">{}</text>"#,
                bottom + 19.0,
                number(*tick)
            );
        }
        let _ = writeln!(svg, r#"<path class="axis" d="M{left} {bottom:.1}H{right}"/>"#);
        let middle = (left + right) / 2.0;
        let _ = writeln!(
            svg,
            r#"<text class="name" x="{middle}" y="{:.1}" text-anchor="middle">{}</text>"#,
            bottom + 38.0,
            self.x.name
        );
        let (x, y) = (14.0, top + HEIGHT / 2.0);
        let _ = writeln!(
            svg,
            r#"<text class="name" transform="translate({x} {y:.1}) rotate(-90)" text-anchor="middle">{}</text>"#,
            self.y.name
        );
    }

    fn draw_mark_lines(&self, svg: &mut String) {
        for (mark, place) in self.marks.iter().zip(self.places()) {
            let x = self.x_of(mark.at);
            let _ = writeln!(
                svg,
                r#"<path class="markline" d="M{x:.1} {:.1}V{:.1}"/>"#,
                lane_y(place.lane, &self.lanes()),
                self.top() + HEIGHT
            );
        }
    }

    fn draw_marks(&self, svg: &mut String) {
        for (mark, place) in self.marks.iter().zip(self.places()) {
            let (x, y) = (self.x_of(mark.at), lane_y(place.lane, &self.lanes()));
            let (anchor, text_x) =
                if place.is_left { ("end", x - BADGE - 5.0) } else { ("start", x + BADGE + 5.0) };
            let _ = writeln!(
                svg,
                r#"<g class="mark"><title>{}</title><circle cx="{x:.1}" cy="{y:.1}" r="{BADGE}"/><text class="digit" x="{x:.1}" y="{:.1}" text-anchor="middle">{}</text><text class="label" x="{text_x:.1}" y="{:.1}" text-anchor="{anchor}">{}</text></g>"#,
                mark.title,
                y + 4.0,
                mark.number,
                y + 4.0,
                mark.label,
            );
        }
    }

    /// Where the label of each mark goes. From right to left, each takes the lowest lane that is free there: so a mark's line passes
    /// below the labels that begin left of it.
    fn places(&self) -> Vec<Place> {
        let mut order: Vec<usize> = (0..self.marks.len()).collect();
        order.sort_by(|a, b| self.marks[*b].at.total_cmp(&self.marks[*a].at));
        let mut places = vec![Place { lane: 0, is_left: false }; self.marks.len()];
        let mut taken: Vec<Vec<(f64, f64)>> = Vec::new();
        for index in order {
            let mark = &self.marks[index];
            let x = self.x_of(mark.at);
            let long = BADGE + 5.0 + mark.label.chars().count() as f64 * LETTER;
            let is_left = x + long > WIDTH - 2.0;
            let (from, to) = if is_left { (x - long, x + BADGE) } else { (x - BADGE, x + long) };
            let is_free =
                |lane: &Vec<(f64, f64)>| lane.iter().all(|(a, b)| to + GAP < *a || *b + GAP < from);
            let lane = taken.iter().position(is_free).unwrap_or(taken.len());
            if lane == taken.len() {
                taken.push(Vec::new());
            }
            taken[lane].push((from, to));
            places[index] = Place { lane, is_left };
        }
        places
    }

    fn lanes(&self) -> Lanes {
        Lanes(self.places().iter().map(|place| place.lane + 1).max().unwrap_or(0))
    }

    fn top(&self) -> f64 {
        8.0 + self.lanes().0 as f64 * LANE
    }

    fn x_of(&self, value: f64) -> f64 {
        LEFT + self.x.share(value) * (WIDTH - LEFT - RIGHT)
    }

    fn y_of(&self, value: f64) -> f64 {
        self.top() + (1.0 - self.y.share(value)) * HEIGHT
    }
}

#[derive(Clone, Copy, Debug)]
struct Place {
    lane: usize,
    is_left: bool,
}

/// How many rows of labels there are.
struct Lanes(usize);

fn lane_y(lane: usize, lanes: &Lanes) -> f64 {
    (lanes.0 - lane) as f64 * LANE - LANE / 2.0 + 2.0
}

/// Without digits that say nothing.
fn number(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 24.0;
const BOTTOM: f64 = 48.0;
const LANE: f64 = 25.0;
const BADGE: f64 = 9.5;
/// Width of a letter of 13 px, rather too wide than too narrow.
const LETTER: f64 = 7.2;
const GAP: f64 = 10.0;

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(places: &[f64]) -> Chart {
        let mark = |(index, at): (usize, &f64)| Mark {
            at: *at,
            number: index + 1,
            label: "all workers killed".to_owned(),
            title: String::new(),
        };
        let marks = places.iter().enumerate().map(mark).collect();
        Chart::new(Axis::from_zero(100.0, 10, "step"), Axis::between(1.3, 4.2, 6, "loss"), marks)
    }

    #[test]
    fn labels_never_share_a_place() {
        for places in
            [vec![15.0, 30.0, 45.0, 62.0, 80.0], vec![50.0; 5], vec![95.0, 96.0, 97.0], vec![]]
        {
            let chart = chart(&places);
            let found = chart.places();
            let wide = BADGE + 5.0 + 18.0 * LETTER;
            let span = |index: usize| {
                let x = chart.x_of(places[index]);
                if found[index].is_left { (x - wide, x + BADGE) } else { (x - BADGE, x + wide) }
            };
            for a in 0..places.len() {
                assert!(span(a).1 <= WIDTH, "{places:?}");
                for b in 0..a {
                    let apart = span(a).1 < span(b).0 || span(b).1 < span(a).0;
                    assert!(apart || found[a].lane != found[b].lane, "{places:?}: {a} and {b}");
                }
            }
        }
    }

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(
            Axis::from_zero(120.0, 6, "").ticks,
            [0.0, 20.0, 40.0, 60.0, 80.0, 100.0, 120.0]
        );
        let ticks = Axis::between(1.3, 4.2, 6, "").ticks;
        assert_eq!(ticks, [1.5, 2.0, 2.5, 3.0, 3.5, 4.0]);
        assert_eq!(Axis::from_zero(0.0, 5, "").to, 1.0);
        assert_eq!(
            (number(0.5), number(120.0), number(0.0)),
            ("0.5".into(), "120".into(), "0".into())
        );
    }

    #[test]
    fn a_picture_holds_what_was_drawn() {
        let mut chart = chart(&[20.0, 21.0]);
        chart.band("lost", 10.0, 12.0, "computed twice");
        chart.curve("run", [(0.0, 4.0), (50.0, 2.0)].into_iter());
        chart.stairs("members", &[(0.0, 4.0), (30.0, 3.0)], 100.0);
        let svg = chart.svg("loss by step");
        assert_eq!(svg.matches("<circle").count(), 2);
        assert!(svg.contains("<title>computed twice</title>") && svg.ends_with("</svg>\n"));
    }
}
