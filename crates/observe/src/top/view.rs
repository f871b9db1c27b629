//! The screen of `ringdisk top`, drawn for any size.
//!
//! Promises: pure; what has no room is left out: first the selected disk in words, then keys and
//! jobs, at last the first line. Names control no terminal.

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Paragraph, Wrap};
use ringdisk_daemon::rates::Rates;
use ringdisk_daemon::size::{human_size, human_time};
use ringdisk_daemon::terminal::visible;

use super::columns;
use super::state::State;

/// Least height for the line of keys.
const KEYS_FROM: u16 = 6;
/// Least height for the selected disk in words.
const WORDS_FROM: u16 = 10;
const KEYS: &str = "q quit  s sort  / filter  arrows select  space hold  + - interval";

/// Draws all of it.
pub(super) fn draw(frame: &mut Frame<'_>, state: &State) {
    let area = frame.area();
    let (width, height) = (usize::from(area.width), area.height);
    let mut rest = area;
    let bold = Style::new().add_modifier(Modifier::BOLD);
    if height >= 3 {
        text(frame, take_top(&mut rest, 1), &title(state), bold);
    }
    if height >= KEYS_FROM {
        let (line, style) = match state.is_editing {
            true => (format!("filter: {}_  (Enter: done, Esc: none)", state.filter), bold),
            false => (KEYS.to_owned(), Style::new().add_modifier(Modifier::DIM)),
        };
        text(frame, take_bottom(&mut rest, 1), &line, style);
    }
    let selected = state.selected();
    if let Some(row) = state.rows.get(selected).filter(|_| height >= WORDS_FROM) {
        let words = words(row);
        let lines = u16::try_from(words.chars().count() / width.max(1)).unwrap_or(u16::MAX);
        // Wrapped at words it takes some more than its letters, and a line stays free above it.
        let part = take_bottom(&mut rest, lines.saturating_add(3).min(height / 3));
        let words = Paragraph::new(Text::from(vec![Line::default(), Line::from(words)]));
        frame.render_widget(words.wrap(Wrap { trim: true }), part);
    }
    let jobs = u16::try_from(state.jobs.len()).unwrap_or(u16::MAX).min(rest.height / 3);
    let part = take_bottom(&mut rest, jobs);
    let lines: Vec<Line<'_>> = state.jobs.iter().map(|job| Line::from(job.as_str())).collect();
    frame.render_widget(Paragraph::new(lines), part);
    table(frame, rest, state, selected);
}

/// The table, from the row on that lets the selected one be seen.
fn table(frame: &mut Frame<'_>, area: Rect, state: &State, selected: usize) {
    let mut rest = area;
    let lines = columns::lines(&state.rows, usize::from(area.width));
    let mut lines = lines.into_iter();
    let heading = lines.next().unwrap_or_default();
    let padded = format!("{heading:<width$}", width = usize::from(area.width));
    text(frame, take_top(&mut rest, 1), &padded, Style::new().add_modifier(Modifier::REVERSED));
    if state.rows.is_empty() {
        let words = match (state.has_rates, state.filter.is_empty()) {
            (false, _) => "looking ...",
            (true, true) => "no disk is served",
            (true, false) => "no disk with this name",
        };
        text(frame, rest, words, Style::new());
        return;
    }
    let seen = usize::from(rest.height).max(1);
    let first = (selected + 1).saturating_sub(seen);
    let marked = Style::new().add_modifier(Modifier::BOLD | Modifier::UNDERLINED);
    let lines: Vec<Line<'_>> = lines
        .enumerate()
        .skip(first)
        .take(seen)
        .map(|(index, line)| match index == selected {
            true => Line::styled(line, marked),
            false => Line::from(line),
        })
        .collect();
    frame.render_widget(Paragraph::new(lines), rest);
}

fn title(state: &State) -> String {
    let sum = |of: fn(&Rates) -> f64| state.rows.iter().map(of).sum::<f64>();
    let requests = sum(|row| row.reads + row.writes) + 0.0;
    let bytes = bytes(sum(|row| row.read_bytes + row.written_bytes));
    let disks = match state.rows.len() {
        1 => String::from("1 disk"),
        count => format!("{count} disks"),
    };
    let mut title = format!("{disks}  {requests:.0} requests/s  {bytes}/s");
    if state.is_held {
        title.push_str("  held");
    }
    title.push_str(&format!("  every {}  by {}", human_time(state.every), state.order.word()));
    if !state.filter.is_empty() {
        title.push_str(&format!("  with '{}'", visible(&state.filter)));
    }
    title
}

/// The numbers of one disk in words.
fn words(row: &Rates) -> String {
    let time = |time: Option<std::time::Duration>| time.map_or(String::from("-"), human_time);
    let health = if row.is_healthy { "" } else { ", has a fault (ringdisk ps)" };
    format!(
        "{}{health}: reads {:.0}/s, {}/s; writes {:.0}/s, {}/s; latency p50 {}, p99 {}; {:.0} in \
         flight, of which {:.0} wait for the storage and {:.0} for the limit; cache hits {} %; \
         {:.2} CPUs; {:.0} errors since the start",
        visible(&row.target),
        row.reads,
        bytes(row.read_bytes),
        row.writes,
        bytes(row.written_bytes),
        time(row.p50),
        time(row.p99),
        row.in_flight.max(row.limited),
        (row.in_flight - row.limited).max(0.0),
        row.limited,
        columns::hits(row),
        row.cpus,
        row.errors,
    )
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Never negative, and rounded.
fn bytes(count: f64) -> String {
    human_size(count.round() as u64)
}

fn text(frame: &mut Frame<'_>, area: Rect, line: &str, style: Style) {
    frame.render_widget(Paragraph::new(Line::styled(line, style)), area);
}

/// Cuts lines off at the top.
fn take_top(rest: &mut Rect, lines: u16) -> Rect {
    let lines = lines.min(rest.height);
    let part = Rect { height: lines, ..*rest };
    *rest = Rect { y: rest.y + lines, height: rest.height - lines, ..*rest };
    part
}

/// Cuts lines off at the bottom.
fn take_bottom(rest: &mut Rect, lines: u16) -> Rect {
    let lines = lines.min(rest.height);
    rest.height -= lines;
    Rect { y: rest.y + rest.height, height: lines, ..*rest }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ringdisk_daemon::rates::Order;

    use super::*;

    fn shown(state: &State, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal");
        terminal.draw(|frame| draw(frame, state)).expect("drawn");
        let buffer = terminal.backend().buffer();
        let row = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        (0..height).map(row).collect()
    }

    fn state(disks: usize) -> State {
        let mut state = State::new(Order::Target, "", Duration::from_secs(1));
        let row = |number| Rates {
            target: format!("/srv/disks/{number:03}\u{1b}[2J.raw"),
            reads: 12_345.0,
            in_flight: 7.0,
            limited: 3.0,
            cache_hits: Some(0.998),
            ..Rates::default()
        };
        let jobs = vec![String::from("nightly running [####----]  50 % of 1 GiB /srv/disks/000")];
        state.set_disks((0..disks).map(row).collect(), jobs);
        state
    }

    #[test]
    fn it_is_drawn_at_every_size_and_small_ones_keep_the_table() {
        for disks in [0, 1, 300] {
            let state = state(disks);
            for (width, height) in (1..210).flat_map(|w| [1, 2, 3, 6, 10, 24].map(|h| (w, h))) {
                let lines = shown(&state, width, height);
                assert!(lines.iter().all(|line| !line.contains('\u{1b}')));
            }
        }
        let small = shown(&state(3), 20, 4);
        assert!(small[1].starts_with(" READS/s DISK"), "{small:?}");
        assert!(small[2].starts_with("   12345 ") && small[2].ends_with("[2J.raw"), "{small:?}");
    }

    #[test]
    fn eighty_columns_have_the_table_the_job_the_selected_disk_and_the_keys() {
        let lines = shown(&state(3), 80, 24);
        assert!(lines[0].starts_with("3 disks  37035 requests/s"), "{lines:#?}");
        assert!(lines[1].contains("READS/s") && lines[1].contains("CPU"), "{lines:#?}");
        let all = lines.join(" ").split_whitespace().collect::<Vec<_>>().join(" ");
        for words in ["nightly running [####", "4 wait for the storage", "99.8 %"] {
            assert!(all.contains(words), "{words}: {all}");
        }
        assert!(lines[23].starts_with("q quit  s sort"), "{lines:#?}");
    }

    #[test]
    fn the_selected_disk_can_be_seen_among_many() {
        let mut state = state(300);
        let end = ratatui::crossterm::event::KeyCode::End;
        state.key(end.into());
        let all = shown(&state, 80, 24).join("\n");
        assert!(all.contains("299\\u{1b}[2J.raw") && !all.contains("/000\\u"), "{all}");
    }
}
