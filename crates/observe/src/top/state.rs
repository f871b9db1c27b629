//! What the screen of `ringdisk top` shows, and what keys do to it.
//!
//! Promises: pure; no key and no number of disks makes it panic.

use std::time::Duration;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ringdisk_daemon::job_text;
use ringdisk_daemon::metrics::Sample;
use ringdisk_daemon::rates::{self, Order, Rates};

/// Shortest and longest interval that keys choose.
const EVERY_MIN: Duration = Duration::from_millis(100);
const EVERY_MAX: Duration = Duration::from_secs(60);
/// Longest filter, characters: a path.
const FILTER_MAX: usize = 4096;
/// Disks that a page key goes over.
const PAGE: usize = 10;

/// The state.
#[derive(Debug, Default)]
pub(super) struct State {
    /// What is sorted by.
    pub(super) order: Order,
    /// Only disks whose name holds it.
    pub(super) filter: String,
    /// Keys go into the filter.
    pub(super) is_editing: bool,
    /// New samples are not shown.
    pub(super) is_held: bool,
    /// The interval.
    pub(super) every: Duration,
    /// Disks that the filter lets through, sorted.
    pub(super) rows: Vec<Rates>,
    /// Lines of their jobs.
    pub(super) jobs: Vec<String>,
    /// The first samples were taken, so there are rates.
    pub(super) has_rates: bool,
    /// The disk that is selected: it stays so where another one comes first.
    selected: Option<String>,
    all: Vec<Rates>,
    all_jobs: Vec<String>,
}

impl State {
    pub(super) fn new(order: Order, filter: &str, every: Duration) -> State {
        State { order, filter: filter.to_owned(), every, ..State::default() }
    }

    /// Takes new samples.
    ///
    /// * `seconds`: since the ones before.
    pub(super) fn take(&mut self, before: &[Sample], now: &[Sample], seconds: f64) {
        if self.is_held {
            return;
        }
        self.set_disks(rates::rates(before, now, seconds), job_text::of_samples(now));
    }

    /// Replaces the disks and jobs on the screen.
    pub(super) fn set_disks(&mut self, all: Vec<Rates>, jobs: Vec<String>) {
        (self.all, self.all_jobs, self.has_rates) = (all, jobs, true);
        self.arrange();
    }

    /// Index of the selected disk among [`State::rows`]: the first one where none is.
    pub(super) fn selected(&self) -> usize {
        let is_it = |row: &Rates| Some(&row.target) == self.selected.as_ref();
        self.rows.iter().position(is_it).unwrap_or(0)
    }

    /// What a key does. `false`: the user wants to leave.
    pub(super) fn key(&mut self, key: KeyEvent) -> bool {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return !matches!(key.code, KeyCode::Char('c' | 'd'));
        }
        if key.modifiers.contains(KeyModifiers::ALT) {
            // Esc and a key in one read are not told from Alt and that key.
            self.key(KeyCode::Esc.into());
            return self.key(KeyEvent::new(key.code, KeyModifiers::NONE));
        }
        if self.is_editing {
            self.edit(key.code);
            return true;
        }
        match key.code {
            KeyCode::Char('q') => return false,
            KeyCode::Char('s') => self.order = self.order.next(),
            KeyCode::Char('r') => self.order = Order::Requests,
            KeyCode::Char('b') => self.order = Order::Bytes,
            KeyCode::Char('l') => self.order = Order::Latency,
            KeyCode::Char('n') => self.order = Order::Target,
            KeyCode::Char('/') => self.is_editing = true,
            KeyCode::Char(' ') => self.is_held = !self.is_held,
            KeyCode::Char('+') => self.every = (self.every * 2).min(EVERY_MAX),
            KeyCode::Char('-') => self.every = (self.every / 2).max(EVERY_MIN),
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Down | KeyCode::Char('j') => self.select(self.selected() + 1),
            KeyCode::Up | KeyCode::Char('k') => self.select(self.selected().saturating_sub(1)),
            KeyCode::PageDown => self.select(self.selected() + PAGE),
            KeyCode::PageUp => self.select(self.selected().saturating_sub(PAGE)),
            KeyCode::Home => self.select(0),
            KeyCode::End => self.select(usize::MAX),
            _ => {}
        }
        self.arrange();
        true
    }

    fn edit(&mut self, key: KeyCode) {
        match key {
            KeyCode::Enter => self.is_editing = false,
            KeyCode::Esc => {
                self.filter.clear();
                self.is_editing = false;
            }
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Char(c) if self.filter.chars().count() < FILTER_MAX => self.filter.push(c),
            _ => {}
        }
        self.arrange();
    }

    fn select(&mut self, index: usize) {
        let last = self.rows.len().saturating_sub(1);
        self.selected = self.rows.get(index.min(last)).map(|row| row.target.clone());
    }

    fn arrange(&mut self) {
        self.rows = self.all.clone();
        rates::arrange(&mut self.rows, self.order, &self.filter);
        self.jobs = self.all_jobs.clone();
        self.jobs.retain(|job| job.contains(&self.filter));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> State {
        let mut state = State::new(Order::Requests, "", Duration::from_secs(1));
        let row = |target: &str, reads: f64, read_bytes: f64| Rates {
            target: target.to_owned(),
            reads,
            read_bytes,
            ..Rates::default()
        };
        let rows = vec![row("/a", 1.0, 9.0), row("/b", 3.0, 1.0), row("/qx", 2.0, 2.0)];
        state
            .set_disks(rows, vec![String::from("job running /a"), String::from("other paused /b")]);
        state
    }

    fn press(state: &mut State, keys: &str) {
        for c in keys.chars() {
            let code = match c {
                '\n' => KeyCode::Enter,
                '\u{1b}' => KeyCode::Esc,
                '\u{7f}' => KeyCode::Backspace,
                c => KeyCode::Char(c),
            };
            assert!(state.key(KeyEvent::new(code, KeyModifiers::NONE)), "{c:?} left");
        }
    }

    fn names(state: &State) -> String {
        state.rows.iter().map(|row| row.target.as_str()).collect()
    }

    #[test]
    fn keys_sort_filter_and_change_the_interval() {
        let mut state = state();
        assert_eq!(names(&state), "/b/qx/a");
        press(&mut state, "s");
        assert_eq!((names(&state).as_str(), state.order), ("/a/qx/b", Order::Bytes));
        press(&mut state, "n");
        assert_eq!(names(&state), "/a/b/qx");
        // In the filter `q` and `s` are letters.
        press(&mut state, "/qs\u{7f}");
        assert_eq!((names(&state).as_str(), state.jobs.len()), ("/qx", 0));
        press(&mut state, "\n++-");
        assert_eq!(state.every, Duration::from_secs(2));
        press(&mut state, "\u{1b}");
        assert_eq!((names(&state).as_str(), state.jobs.len()), ("/a/b/qx", 2));
        press(&mut state, &"-".repeat(40));
        assert_eq!(state.every, EVERY_MIN);
        press(&mut state, &"+".repeat(40));
        assert_eq!(state.every, EVERY_MAX);
    }

    #[test]
    fn a_selected_disk_stays_selected_when_the_order_changes_and_ends_with_its_disk() {
        let mut state = state();
        press(&mut state, "j");
        assert_eq!(state.rows[state.selected()].target, "/qx");
        press(&mut state, "n");
        assert_eq!((state.selected(), state.rows[2].target.as_str()), (2, "/qx"));
        press(&mut state, "jjjj");
        assert_eq!(state.selected(), 2);
        state.set_disks(Vec::new(), Vec::new());
        press(&mut state, "jk/x\ns");
        assert_eq!((state.selected(), state.rows.len()), (0, 0));
    }

    #[test]
    fn a_held_screen_takes_no_samples_and_q_and_control_c_leave() {
        let mut state = state();
        press(&mut state, " ");
        state.take(&[], &[], 1.0);
        assert_eq!(state.rows.len(), 3);
        press(&mut state, " ");
        state.take(&[], &[], 1.0);
        assert!(state.rows.is_empty());
        assert!(!state.key(KeyEvent::new(KeyCode::Char('q'), KeyModifiers::NONE)));
        press(&mut state, "/");
        assert!(!state.key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
        assert!(!state.key(KeyEvent::new(KeyCode::Char('q'), KeyModifiers::ALT)));
    }
}
