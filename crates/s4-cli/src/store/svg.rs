//! Writes SVG: rectangles, lines, text.

use std::fmt::Write as _;

/// Which part of a text is at its position.
#[derive(Clone, Copy)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

/// A picture that is being drawn. Lengths are pixels; (0, 0) is the upper left corner.
pub(crate) struct Svg(String);

impl Svg {
    pub(crate) fn new(width: f64, height: f64) -> Self {
        Self(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
             viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"Helvetica, Arial, sans-serif\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
        ))
    }

    fn push(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a string does not fail.
        let _ = self.0.write_fmt(line);
        self.0.push('\n');
    }

    /// A rectangle, with a text that appears where a pointer rests on it.
    pub(crate) fn rect(&mut self, x: f64, y: f64, w: f64, h: f64, fill: &str, title: Option<&str>) {
        let place = format!("x=\"{x:.2}\" y=\"{y:.2}\" width=\"{w:.2}\" height=\"{h:.2}\"");
        match title {
            None => self.push(format_args!("<rect {place} fill=\"{fill}\"/>")),
            Some(title) => self.push(format_args!(
                "<rect {place} fill=\"{fill}\"><title>{}</title></rect>",
                escaped(title)
            )),
        }
    }

    pub(crate) fn line(&mut self, x1: f64, y1: f64, x2: f64, y2: f64, stroke: &str) {
        self.push(format_args!(
            "<line x1=\"{x1:.2}\" y1=\"{y1:.2}\" x2=\"{x2:.2}\" y2=\"{y2:.2}\" stroke=\"{stroke}\"/>"
        ));
    }

    pub(crate) fn polyline(&mut self, points: &[(f64, f64)], stroke: &str) {
        let points: Vec<_> = points.iter().map(|(x, y)| format!("{x:.2},{y:.2}")).collect();
        let points = points.join(" ");
        self.push(format_args!(
            "<polyline points=\"{points}\" fill=\"none\" stroke=\"{stroke}\" stroke-width=\"1.5\"/>"
        ));
    }

    pub(crate) fn dot(&mut self, x: f64, y: f64, r: f64, fill: &str) {
        self.push(format_args!("<circle cx=\"{x:.2}\" cy=\"{y:.2}\" r=\"{r}\" fill=\"{fill}\"/>"));
    }

    pub(crate) fn text(&mut self, x: f64, y: f64, size: f64, fill: &str, at: Anchor, text: &str) {
        let anchor = match at {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        self.push(format_args!(
            "<text x=\"{x:.2}\" y=\"{y:.2}\" font-size=\"{size}\" fill=\"{fill}\" \
             text-anchor=\"{anchor}\">{}</text>",
            escaped(text)
        ));
    }

    pub(crate) fn finish(mut self) -> String {
        self.0.push_str("</svg>\n");
        self.0
    }
}

/// Text escaped for XML; characters that XML cannot hold are left out.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() => {}
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_break_the_picture() {
        let mut svg = Svg::new(10.0, 10.0);
        svg.text(0.0, 0.0, 9.0, "black", Anchor::End, "a<b>&\"\u{1}c");
        assert!(svg.finish().contains(">a&lt;b&gt;&amp;&quot;c</text>"));
    }
}
