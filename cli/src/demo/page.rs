//! The page: one file with everything in it, to be sent to somebody or looked at in a year.
//!
//! It has no script and loads nothing. Every text on it is ours or a number, so nothing needs to be escaped.

use std::fmt::Write;

use super::chart::{Axis, Chart, Mark};
use super::report::Report;
use super::table::{self, COLUMNS, cells};
use crate::rehearsal::cluster;
use crate::rehearsal::measure::{Kind, Measured};
use crate::rehearsal::{duration, plural};

/// The whole page.
pub(super) fn html(report: &Report) -> String {
    let body = [
        head(report),
        tiles(report),
        loss(report),
        members(report),
        costs(report),
        meanings(report),
        foot(report),
    ];
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>Ripstop demo</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n{}</main>\n</body>\n</html>\n",
        body.concat()
    )
}

fn head(report: &Report) -> String {
    let (class, sign) = if report.equal { ("verdict", "✓") } else { ("verdict bad", "✗") };
    let verdict = report.verdict();
    let (verdict, rest) = verdict.split_once(':').unwrap_or((&verdict, ""));
    format!(
        "<h1>Ripstop demo</h1>\n<p class=\"lead\">A small transformer is trained for {} steps by {} workers on two agents, with {} \
         coordinators, all processes of one machine. Five times something happens to it. Then the same job is trained by one worker that \
         nothing happens to.</p>\n\
         <div class=\"{class}\"><p><b>{sign} {verdict}</b>:{rest}. {} states of members were compared.</p>\n\
         <p class=\"digests\"><span>with faults</span> {}<br><span>undisturbed</span> {}</p></div>\n",
        report.steps,
        cluster::EXPECTED_MEMBERS,
        cluster::COORDINATORS,
        report.states_compared,
        report.digest,
        report.undisturbed_digest,
    )
}

fn tiles(report: &Report) -> String {
    let of = |kind: Kind| report.events.iter().find(|event| event.kind == kind);
    let time = |millis: Option<f64>| millis.map_or_else(|| "–".to_owned(), duration);
    let recovery = of(Kind::Kill).and_then(|event| event.recovery_ms);
    let elected = of(Kind::Leader).and_then(|event| event.detected_ms);
    let meanwhile = of(Kind::Leader).and_then(|event| event.steps_meanwhile).unwrap_or(0);
    let lost = of(Kind::All).map_or(0, |event| event.lost_steps);
    let back = of(Kind::All).and_then(|event| event.recovery_ms);
    let tiles = [
        (time(recovery), "recovery after SIGKILL in mid-step, recomputation aside".to_owned()),
        (
            time(elected),
            format!("to a new leader; {} finished meanwhile", plural(meanwhile, "step", "steps")),
        ),
        (
            time(back),
            "from the death of all workers to the next step, their restart included".to_owned(),
        ),
        (
            lost.to_string(),
            format!(
                "{} lost when all workers died, since the last checkpoint",
                if lost == 1 { "step" } else { "steps" }
            ),
        ),
    ];
    let tile = |(number, text): &(String, String)| {
        format!("<div class=\"tile\"><strong>{number}</strong><span>{text}</span></div>\n")
    };
    format!("<div class=\"tiles\">\n{}</div>\n", tiles.iter().map(tile).collect::<String>())
}

fn loss(report: &Report) -> String {
    let curves = &report.curves;
    let values = || curves.loss.values().chain(curves.undisturbed_loss.values()).copied();
    let (least, most) = (values().fold(f64::INFINITY, f64::min), values().fold(0.0, f64::max));
    let y = if least < most {
        Axis::between((least * 2.0).floor() / 2.0, (most * 2.0).ceil() / 2.0, 6, "loss")
    } else {
        Axis::from_zero(most, 6, "loss")
    };
    let marks = report.events.iter().map(|event| mark(event, event.step as f64)).collect();
    let mut chart = Chart::new(Axis::from_zero(report.steps as f64, 12, "step"), y, marks);
    let points = |curve: &std::collections::BTreeMap<u64, f64>| {
        curve.iter().map(|(step, loss)| (*step as f64, *loss)).collect::<Vec<_>>().into_iter()
    };
    if let Some((from, to)) = curves.lost {
        chart.band(
            "lost",
            from as f64,
            to as f64,
            &format!(
                "steps {from} to {}: lost with all workers, and computed again",
                to.saturating_sub(1)
            ),
        );
    }
    chart.curve("calm-line", points(&curves.undisturbed_loss));
    chart.curve("run-line", points(&curves.loss));
    for (step, loss) in &curves.loss {
        let calm = curves
            .undisturbed_loss
            .get(step)
            .map_or_else(|| "–".to_owned(), |loss| format!("{loss:.6}"));
        let title = format!("step {step}: loss {loss:.6} with faults, {calm} undisturbed");
        chart.band("hit", *step as f64 - 0.5, *step as f64 + 0.5, &title);
    }
    format!(
        "<section>\n<h2>Loss of both runs</h2>\n<p class=\"note\">One curve lies on the other: a fault never changes what is learned.</p>\n\
         <ul class=\"key\"><li><i></i>with faults</li><li><i class=\"calm\"></i>undisturbed</li>{}</ul>\n\
         <div class=\"scroll\">{}</div>\n</section>\n",
        curves
            .lost
            .map_or("", |_| "<li><i class=\"lost\"></i>lost with all workers, computed again</li>"),
        chart.svg("Loss by step of both runs, with the five events marked"),
    )
}

fn members(report: &Report) -> String {
    let curves = &report.curves;
    let most = curves.members.iter().map(|(_, count)| *count).max().unwrap_or(1);
    let y = Axis {
        from: 0.0,
        to: most as f64 + 0.5,
        ticks: (0..=most).map(|n| n as f64).collect(),
        name: "members".to_owned(),
    };
    let at = |kind: Kind| curves.faults.iter().find(|(k, _)| *k == kind).map(|(_, at)| *at);
    let place = |event: &Measured| {
        // A joiner counts from its first world on, not from its start.
        let later =
            if event.kind == Kind::Join { event.world_ms.unwrap_or(0.0) / 1e3 } else { 0.0 };
        at(event.kind).map(|at| mark(event, at + later))
    };
    let marks = report.events.iter().filter_map(place).collect();
    let mut chart = Chart::new(
        Axis::from_zero(curves.end.ceil(), 12, "seconds since training began"),
        y,
        marks,
    );
    if let Some((from, to)) = curves.leaderless {
        chart.band(
            "lost",
            from,
            to,
            &format!("no coordinator led for {}", duration((to - from) * 1e3)),
        );
    }
    let points: Vec<(f64, f64)> =
        curves.members.iter().map(|(at, count)| (*at, *count as f64)).collect();
    chart.stairs("members", &points, curves.end);
    for (index, (from, count)) in curves.members.iter().enumerate() {
        let to = curves.members.get(index + 1).map_or(curves.end, |(next, _)| *next);
        chart.band("hit", *from, to, &format!("{count} members from {from:.2} s to {to:.2} s"));
    }
    format!(
        "<section>\n<h2>Members over time</h2>\n<p class=\"note\">Who serves virtual ranks. The job always means {} of them, however few \
         members share them out.</p>\n<ul class=\"key\"><li><i></i>members</li>{}</ul>\n<div class=\"scroll\">{}</div>\n</section>\n",
        cluster::VIRTUAL_RANKS,
        curves.leaderless.map_or("", |_| "<li><i class=\"lost\"></i>no coordinator leads</li>"),
        chart.svg("Number of members over time, with the five events marked"),
    )
}

fn mark(event: &Measured, at: f64) -> Mark {
    let number = number(event.kind);
    Mark {
        at,
        number,
        label: event.kind.name().to_owned(),
        title: format!("{}: {}", event.kind.name(), table::sentence(event)),
    }
}

/// Events are numbered in the order in which they come.
fn number(kind: Kind) -> usize {
    Kind::DEMO.iter().position(|k| *k == kind).map_or(0, |index| index + 1)
}

fn costs(report: &Report) -> String {
    let mut rows = String::new();
    for event in &report.events {
        let [name, rest @ ..] = cells(event);
        let rest: String = rest.iter().map(|cell| format!("<td>{cell}</td>")).collect();
        let _ = writeln!(
            rows,
            "<tr><td><span class=\"number\">{}</span>{name}</td>{rest}</tr>",
            number(event.kind)
        );
    }
    let names: String = COLUMNS.iter().map(|name| format!("<th>{name}</th>")).collect();
    format!(
        "<section>\n<h2>What each event cost</h2>\n<p class=\"note\">Times count from the event. Noticed: by the agent (a death), by the \
         coordinators (a join, a drain), or by the successor that was elected (the leader’s death). New world: the last member has \
         adopted it. Step: the last member has the sum of the step that was on its way, or of the first one of the new world. Recovery: \
         all of that but the computation of leaves.</p>\n\
         <div class=\"scroll\"><table>\n<thead><tr>{names}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table></div>\n</section>\n"
    )
}

fn meanings(report: &Report) -> String {
    let item = |event: &Measured| {
        format!(
            "<li><span class=\"number\">{}</span><span>{}</span></li>\n",
            number(event.kind),
            event.kind.meaning()
        )
    };
    format!(
        "<section>\n<h2>What happened</h2>\n<ol class=\"what\">\n{}</ol>\n</section>\n",
        report.events.iter().map(item).collect::<String>()
    )
}

fn foot(report: &Report) -> String {
    format!(
        "<footer>Both runs took {:.0} s. Made by <code>ripstop demo</code>, version {}: {} virtual ranks, {} ms of waiting in each leaf \
         as for a GPU (not in the undisturbed run), times by one monotonic clock.</footer>\n",
        report.wall_s,
        env!("CARGO_PKG_VERSION"),
        cluster::VIRTUAL_RANKS,
        cluster::LEAF_MS,
    )
}

const STYLE: &str = include_str!("page.css");

#[cfg(test)]
mod tests {
    use super::super::report::Curves;
    use super::*;

    fn report(equal: bool) -> Report {
        let event = |kind| Measured {
            kind,
            step: 20,
            detected_ms: Some(3.0),
            world_ms: Some(30.0),
            step_ms: Some(96.0),
            recompute_ms: None,
            lost_steps: 0,
            recovery_ms: None,
            recomputed_leaves: None,
            steps_meanwhile: None,
            left_ms: None,
            phases: None,
            step_delay_ms: None,
            members_before: 4,
            members_after: 3,
        };
        let curves = Curves {
            loss: (0..60).map(|step| (step, 5.0 - step as f64 / 30.0)).collect(),
            members: vec![(0.0, 4), (3.0, 3)],
            faults: Kind::DEMO.map(|kind| (kind, 2.0)).to_vec(),
            leaderless: Some((2.0, 2.3)),
            lost: Some((40, 48)),
            end: 9.5,
            ..Curves::default()
        };
        Report {
            digest: types::Digest::of(b"a"),
            undisturbed_digest: types::Digest::of(if equal { b"a" } else { b"b" }),
            equal,
            steps: 60,
            states_compared: 240,
            first_difference: (!equal).then_some(7),
            events: Kind::DEMO.map(event).to_vec(),
            wall_s: 60.0,
            curves,
        }
    }

    #[test]
    fn the_page_loads_nothing_and_shows_all_events_twice() {
        let page = html(&report(true));
        for outside in ["http:", "https:", "<script", "@import", "url("] {
            assert!(!page.contains(outside), "{outside}");
        }
        assert_eq!(page.matches("<svg").count(), 2);
        assert_eq!(page.matches("<circle").count(), 10);
        assert!(page.contains("<b>✓ equal digests</b>"));
    }

    #[test]
    fn a_difference_is_said_with_its_step() {
        let page = html(&report(false));
        assert!(page.contains("<b>✗ DIFFERENT digests</b>") && page.contains("first after step 7"));
    }

    #[test]
    fn numbers_without_curves_still_make_a_page() {
        let page = html(&Report { curves: Curves::default(), events: Vec::new(), ..report(true) });
        assert!(!page.contains("NaN") && !page.contains("inf"), "{page}");
    }
}
