//! Links in markdown: those into the tree must lead somewhere, and an anchor must be a heading there.

use std::fs;
use std::path::{Component, Path, PathBuf};

/// One refusal per link that leads nowhere. `pages` are paths from the root and texts.
pub(crate) fn check(root: &Path, pages: &[(String, String)]) -> Vec<String> {
    let mut refusals = Vec::new();
    for (name, text) in pages {
        for (line, target) in links(text) {
            if let Err(reason) = follow(root, name, &target) {
                refusals.push(format!("{name}:{line}: the link {target} leads nowhere: {reason}"));
            }
        }
    }
    refusals
}

fn follow(root: &Path, page: &str, target: &str) -> Result<(), String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return Ok(());
    }
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let from = Path::new(page).parent().unwrap_or(Path::new(""));
    let file = match path {
        "" => PathBuf::from(page),
        path => normal(&from.join(path)).ok_or("it leaves the tree")?,
    };
    let file = root.join(file);
    if !file.exists() {
        return Err("no such file".into());
    }
    if anchor.is_empty() || file.extension().is_none_or(|extension| extension != "md") {
        return Ok(());
    }
    let text = fs::read_to_string(&file).map_err(|error| error.to_string())?;
    if headings(&text).iter().any(|heading| heading == anchor) {
        Ok(())
    } else {
        Err("no such heading".into())
    }
}

/// The path without `.` and `..`; `None` if it climbs out of the tree.
fn normal(path: &Path) -> Option<PathBuf> {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(part) => normal.push(part),
            Component::CurDir => {}
            Component::ParentDir if normal.pop() => {}
            _ => return None,
        }
    }
    Some(normal)
}

/// Line and target of each link outside code: `[text](target)` and `[name]: target`.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (place, line) in prose(text) {
        let line = without_code(line);
        if let Some((_, target)) =
            line.trim_start().strip_prefix('[').and_then(|rest| rest.split_once("]: "))
        {
            found.push((place, target.trim().to_string()));
            continue;
        }
        for (at, opening) in line.match_indices("](") {
            let rest = &line[at + opening.len()..];
            let Some(end) = rest.find(')') else { continue };
            // A title may follow the target.
            let target = rest[..end].split_whitespace().next().unwrap_or_default();
            found.push((place, target.trim_matches(['<', '>']).to_string()));
        }
    }
    found
}

/// The anchors of a page: its headings in lower case, spaces as hyphens, without other signs.
fn headings(text: &str) -> Vec<String> {
    let titles = prose(text)
        .filter(|(_, line)| line.starts_with('#'))
        .map(|(_, line)| line.trim_start_matches('#').trim());
    let slug = |title: &str| {
        let kept = title.to_lowercase();
        let kept = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    titles.map(slug).collect()
}

/// The numbered lines outside fenced code.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(place, line)| {
        let is_fence = line.trim_start().starts_with("```");
        fenced ^= is_fence;
        (!fenced && !is_fence).then_some((place + 1, line))
    })
}

/// The line without what stands between backticks.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_found_outside_code_only() {
        let text = "see [a](x.md) and [b](y.md#top \"title\")\n\n```\n[c](z.md)\n```\n`[d](w.md)` [`e`](<v.md>)\n\n[f]: u.md\n";
        let targets: Vec<_> =
            links(text).into_iter().map(|(line, target)| format!("{line} {target}")).collect();
        assert_eq!(targets, ["1 x.md", "1 y.md#top", "6 v.md", "8 u.md"]);
    }

    #[test]
    fn headings_become_anchors() {
        let text = "# Life of a step\n```\n# no heading\n```\n## What `xtask` does, exactly\n";
        assert_eq!(headings(text), ["life-of-a-step", "what-xtask-does-exactly"]);
    }

    #[test]
    fn a_link_must_lead_to_a_file_of_the_tree() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        assert!(follow(root, "src/main.rs", "tidy.rs").is_ok());
        assert!(follow(root, "src/main.rs", "../Cargo.toml#any").is_ok());
        assert!(follow(root, "src/main.rs", "https://example.org/nothing").is_ok());
        assert!(follow(root, "src/main.rs", "nothing.rs").is_err());
        assert!(follow(root, "src/main.rs", "../../outside.md").is_err());
    }
}
