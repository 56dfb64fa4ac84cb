//! Refuses what is never right in this tree, and lists what is worth a look.
//!
//! Refused: an import between rooms that points up or sideways, an outside crate outside its file, `mod.rs`, a link that leads
//! nowhere, a task left in a comment without an issue's number, an invariant that nobody checks. The longest files and
//! functions are only listed: sizes are a compass.

mod arrows;
mod links;
mod source;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::workspace::Workspace;
use source::Source;

/// Checks the whole tree; the error counts the refusals, which are printed one a line.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let root = workspace.root();
    let mut refusals = arrows::check(workspace)?;
    let (mut sources, mut pages) = (Vec::new(), Vec::new());
    for path in files(root)? {
        let name = path.strip_prefix(root)?.to_string_lossy().replace('\\', "/");
        let extension = path.extension().unwrap_or_default().to_string_lossy();
        if !matches!(&*extension, "rs" | "md" | "toml" | "py" | "sh" | "yml" | "yaml" | "") {
            continue;
        }
        let Ok(text) = fs::read_to_string(&path) else { continue };
        match &*extension {
            "rs" => sources.push(Source::new(&name, &text)),
            "md" => pages.push((name.clone(), text.clone())),
            _ => {}
        }
        if extension != "md" {
            refusals.extend(tasks_without_number(&name, &text));
        }
    }
    for source in &sources {
        refusals.extend(source.crates_out_of_place());
        if source.name().ends_with("/mod.rs") {
            refusals.push(format!(
                "{}: a module `foo` lies in `foo.rs`, never in `foo/mod.rs`",
                source.name()
            ));
        }
    }
    refusals.extend(links::check(root, &pages));
    refusals.extend(unregistered_invariants(&sources));
    list_longest(&sources);
    for refusal in &refusals {
        eprintln!("tidy: {refusal}");
    }
    if !refusals.is_empty() {
        bail!("tidy refuses {} thing(s)", refusals.len());
    }
    Ok(())
}

/// Every file of the tree, in order of name; build output and git's own files left out.
fn files(root: &Path) -> Result<Vec<PathBuf>> {
    let (mut found, mut folders) = (Vec::new(), vec![root.to_path_buf()]);
    while let Some(folder) = folders.pop() {
        let entries =
            fs::read_dir(&folder).with_context(|| format!("can't list {}", folder.display()))?;
        for entry in entries {
            let entry = entry?;
            let (name, kind) = (entry.file_name(), entry.file_type()?);
            let name = name.to_string_lossy();
            let skipped = name == ".git"
                || name == "target"
                || name.starts_with("target-")
                || name == "shared";
            if kind.is_dir() && !skipped {
                folders.push(entry.path());
            } else if kind.is_file() {
                found.push(entry.path());
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Tasks left in comments must name their issue: `(#12)` or ` #12` right after the word.
fn tasks_without_number(name: &str, text: &str) -> Vec<String> {
    let mut refusals = Vec::new();
    for (place, line) in text.lines().enumerate() {
        for (at, word) in line.match_indices(TASK) {
            let is_word = |c: char| c.is_alphanumeric() || c == '_';
            let rest = &line[at + word.len()..];
            if line[..at].ends_with(is_word) || rest.starts_with(is_word) {
                continue;
            }
            let number = rest.trim_start_matches(['(', ' ', ':']).strip_prefix('#');
            if !number.is_some_and(|n| n.starts_with(|c: char| c.is_ascii_digit())) {
                refusals.push(format!(
                    "{name}:{}: {TASK} without an issue number, as in {TASK}(#12)",
                    place + 1
                ));
            }
        }
    }
    refusals
}

/// Every file in the invariants' folder must be declared and used in the list beside it.
fn unregistered_invariants(sources: &[Source]) -> Vec<String> {
    let list = sources.iter().find(|source| source.name() == INVARIANTS_LIST);
    let mut refusals = Vec::new();
    for source in sources {
        let Some(invariant) =
            source.name().strip_prefix(INVARIANTS_FOLDER).and_then(|n| n.strip_suffix(".rs"))
        else {
            continue;
        };
        let declared =
            list.is_some_and(|list| list.declares_module(invariant) && list.uses_path(invariant));
        if !declared && !invariant.contains('/') {
            refusals.push(format!(
                "{}: not registered in {INVARIANTS_LIST}, so nothing checks it",
                source.name()
            ));
        }
    }
    refusals
}

fn list_longest(sources: &[Source]) {
    let files = sources.iter().map(|source| (source.lines(), source.name().to_string()));
    let functions = sources.iter().flat_map(Source::functions);
    for (title, list) in [("files", files.collect::<Vec<_>>()), ("functions", functions.collect())]
    {
        let mut list = list;
        list.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
        eprintln!("longest {title}, in lines:");
        for (lines, name) in list.iter().take(LISTED) {
            eprintln!("  {lines:5}  {name}");
        }
    }
}

/// Written in two halves, so that this file does not refuse itself.
const TASK: &str = concat!("TO", "DO");

const INVARIANTS_LIST: &str = "chaos-tests/src/invariants.rs";
const INVARIANTS_FOLDER: &str = "chaos-tests/src/invariants/";

/// How many files and functions are listed.
const LISTED: usize = 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_needs_the_number_of_its_issue() {
        let refused = |line: &str| !tasks_without_number("a.rs", line).is_empty();
        assert!(refused(concat!("// TO", "DO: later")));
        assert!(refused(concat!("// TO", "DO(me)")));
        assert!(!refused(concat!("// TO", "DO(#12): later")));
        assert!(!refused(concat!("// TO", "DO #12")));
        assert!(!refused(concat!("let TO", "DOS = 1;")));
    }

    #[test]
    fn an_invariant_must_be_declared_and_used() {
        let file = Source::new("chaos-tests/src/invariants/no_gaps.rs", "");
        let check = |list: &str| {
            let list = Source::new(INVARIANTS_LIST, list);
            unregistered_invariants(&[list, Source::new(file.name(), "")]).len()
        };
        assert_eq!(
            unregistered_invariants(&[Source::new(file.name(), "")]).len(),
            1,
            "no list at all"
        );
        assert_eq!(check("mod no_gaps;"), 1);
        assert_eq!(check("// mod no_gaps; no_gaps::check"), 1);
        assert_eq!(check("mod no_gaps;\nconst ALL: &[Check] = &[no_gaps::check];"), 0);
    }
}
